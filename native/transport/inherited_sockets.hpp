// Connections that a forked child must not keep open.
//
// A connection ends when all processes that have it have closed it. A child that merely lives on (a data
// loader's worker) would keep its parent's peers from seeing that the parent is gone.
#pragma once

namespace sealring {

// fork() closes it in the child. Not for a bare system call, for which no handler runs.
void close_in_children(int socket);
// Before it is closed here: its number may then stand for another file.
void forget_in_children(int socket);

}  // namespace sealring
