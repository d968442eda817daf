"""What a worker shows of itself while it runs: to `sealring top` and `doctor --watch`.

directory    the private directory that holds one Unix socket for each worker
status       what a worker answers, as plain values
gather       the status of this process, from its flight recorders
server       the thread that answers on the socket
worker       starts that thread once in a process, and removes the socket at its end
reader       asks all workers of a directory
exporter     their answers as text for Prometheus, over HTTP, in a process of its own
watch        the sockets of a job, and which of them are sealed links

Knows no torch. No answer holds a key, a secret or a tensor. Nothing here may fail a collective.
"""
