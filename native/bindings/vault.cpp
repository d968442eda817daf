// Bindings that write and read sealed files, and wrap keys.
#include <fcntl.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <system_error>
#include <utility>

#include "bindings/bind.hpp"
#include "bindings/buffer.hpp"
#include "bindings/convert.hpp"
#include "bindings/secrets.hpp"
#include "vault/key_wrap.hpp"
#include "vault/parallel.hpp"
#include "vault/problem.hpp"
#include "vault/sealed_file_reader.hpp"
#include "vault/sealed_file_writer.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

namespace {

const char* error_name(FileProblem problem) {
  switch (problem) {
    case FileProblem::truncated:
      return "TruncatedFile";
    case FileProblem::wrong_key:
      return "WrongKey";
    case FileProblem::tampered:
      return "TamperedChunk";
    case FileProblem::closed:
      return "AlreadyClosed";
    case FileProblem::too_long:
    case FileProblem::out_of_range:
      break;
  }
  return nullptr;
}

void set_python_error(const SealedFileError& error) {
  const char* const name = error_name(error.problem);
  const nb::object type = name == nullptr
                              ? nb::borrow(PyExc_ValueError)
                              : nb::object(nb::module_::import_("sealring.errors").attr(name));
  PyErr_SetString(type.ptr(), error.what());
}

void set_os_error(const std::system_error& error) {
  const nb::object made =
      nb::borrow(PyExc_OSError)(error.code().value(), std::string(error.what()));
  PyErr_SetObject(PyExc_OSError, made.ptr());
}

Suite suite_named(const std::string& name) {
  if (name == "AEAD_AES_256_GCM") return Suite::aes_256_gcm;
  if (name == "AEAD_CHACHA20_POLY1305") return Suite::chacha20_poly1305;
  throw nb::value_error("the suite is neither AEAD_AES_256_GCM nor AEAD_CHACHA20_POLY1305");
}

size_t thread_count(int threads) {
  return threads > 0 ? static_cast<size_t>(threads) : usable_cpus();
}

template <typename Array>
nb::bytes array_bytes(const Array& array) {
  return nb::bytes(array.data(), array.size());
}

template <typename Self, typename Call>
auto unlocked(Self& self, const Call& call) {
  const nb::gil_scoped_release released;
  return (self.*call)();
}

// Holds views of several buffers while the native code reads or fills them.
class Views {
 public:
  void add(const nb::handle& object, bool writable) {
    views_.push_back(std::make_unique<BufferView>(nb::borrow(object), writable));
  }
  const BufferView& operator[](size_t at) const { return *views_[at]; }
  size_t size() const { return views_.size(); }

 private:
  std::vector<std::unique_ptr<BufferView>> views_;
};

void write_pieces(SealedFileWriter& self, const nb::sequence& pieces) {
  Views views;
  for (const nb::handle piece : pieces) views.add(piece, false);
  std::vector<SealedFileWriter::Plain> spans;
  spans.reserve(views.size());
  for (size_t i = 0; i < views.size(); ++i) spans.emplace_back(views[i].data(), views[i].size());
  const nb::gil_scoped_release released;
  self.write(spans);
}

// Keeps a Python function that any thread may release: the last copy may be destroyed in a thread that does
// not hold the GIL.
std::shared_ptr<nb::callable> kept_for_any_thread(nb::callable function) {
  return {new nb::callable(std::move(function)), [](nb::callable* kept) {
            const nb::gil_scoped_acquire held;
            delete kept;
          }};
}

// Converts "sha256", or a Python function f(view, step, count) that returns the digests of a row of chunks.
// The function must not keep the view: the memory is used again.
ChunkHash hash_from(const nb::object& hash) {
  if (nb::isinstance<nb::str>(hash) && nb::cast<std::string>(hash) == "sha256") {
    return sha256_of_chunks;
  }
  if (!nb::isinstance<nb::callable>(hash)) {
    throw nb::value_error("a hash of chunks is \"sha256\" or a function");
  }
  const auto kept = kept_for_any_thread(nb::cast<nb::callable>(hash));
  return [kept](const ChunkRow& chunks, uint8_t* digests) {
    const size_t bytes = (chunks.count - 1) * chunks.step + chunks.last_bytes;
    const nb::gil_scoped_acquire held;
    // The view is read-only, so nothing is written there.
    auto* const start = const_cast<char*>(reinterpret_cast<const char*>(chunks.plain));
    const auto view =
        nb::steal(PyMemoryView_FromMemory(start, static_cast<Py_ssize_t>(bytes), PyBUF_READ));
    if (!view.is_valid()) throw nb::python_error();
    const nb::object given = (*kept)(view, chunks.step, chunks.count);
    const BufferView found(given, false);
    if (found.size() != chunks.count * kDigestBytes) {
      throw nb::value_error("a hash of chunks gave another number of digests");
    }
    std::memcpy(digests, found.data(), found.size());
  };
}

// Makes a source of a Python function that returns the bytes of a range.
SealedFileReader::Source from_python(nb::callable read, const std::string& name) {
  return [kept = kept_for_any_thread(std::move(read)), name](uint64_t offset, uint8_t* into,
                                                             size_t bytes) {
    const nb::gil_scoped_acquire held;
    const nb::object given = (*kept)(offset, bytes);
    const BufferView view(given, false);
    if (view.size() != bytes) {
      throw SealedFileError(FileProblem::truncated,
                            name + " became shorter while it was read: restore it from a copy");
    }
    std::memcpy(into, view.data(), bytes);
  };
}

uint64_t file_size(int file, const std::string& name) {
  struct stat status{};
  if (::fstat(file, &status) != 0) {
    throw std::system_error(errno, std::generic_category(), name + " cannot be read");
  }
  return static_cast<uint64_t>(status.st_size);
}

// Adds the runs of bytes that form one box of a row-major array in the file.
void add_runs(std::vector<WantedRun>& runs, const nb::tuple& wanted, const BufferView& into) {
  const auto start = nb::cast<uint64_t>(wanted[1]);
  const auto item = nb::cast<uint64_t>(wanted[2]);
  const auto shape = nb::cast<std::vector<uint64_t>>(wanted[3]);
  const auto offsets = nb::cast<std::vector<uint64_t>>(wanted[4]);
  const auto lengths = nb::cast<std::vector<uint64_t>>(wanted[5]);
  if (shape.size() != offsets.size() || shape.size() != lengths.size()) {
    throw nb::value_error("shape, offsets and lengths have different numbers of dimensions");
  }
  uint64_t total = item;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (offsets[i] > shape[i] || lengths[i] > shape[i] - offsets[i]) {
      throw nb::value_error("the box reaches out of the array");
    }
    if (lengths[i] != 0 && total > std::numeric_limits<uint64_t>::max() / lengths[i]) {
      throw nb::value_error("the box is too large");
    }
    total *= lengths[i];
  }
  if (total != into.size()) throw nb::value_error("the buffer has another size than the box");
  if (total == 0) return;
  // The innermost dimensions that are wanted whole, together with the next one, form one run.
  size_t inner = shape.size();
  uint64_t run = item;
  while (inner > 0) {
    --inner;
    run *= lengths[inner];
    if (lengths[inner] != shape[inner]) break;
  }
  std::vector<uint64_t> strides(shape.size() + 1, item);
  for (size_t i = shape.size(); i-- > 0;) strides[i] = strides[i + 1] * shape[i];
  uint64_t base = start;
  for (size_t i = 0; i < shape.size(); ++i) base += offsets[i] * strides[i + 1];
  std::vector<uint64_t> index(inner, 0);
  for (uint64_t done = 0; done < total; done += run) {
    uint64_t at = base;
    for (size_t i = 0; i < inner; ++i) at += index[i] * strides[i + 1];
    runs.push_back({at, static_cast<size_t>(run), into.data() + done});
    for (size_t i = inner; i-- > 0;) {
      if (++index[i] < lengths[i]) break;
      index[i] = 0;
    }
  }
}

// The runs to read, which follow each other in `into`. Offsets and sizes are arrays of uint64.
std::vector<WantedRun> packed_runs(const BufferView& offsets, const BufferView& sizes,
                                   const BufferView& into) {
  if (offsets.size() != sizes.size() || offsets.size() % sizeof(uint64_t) != 0) {
    throw nb::value_error("offsets and sizes are arrays of uint64 of one length");
  }
  std::vector<WantedRun> runs(offsets.size() / sizeof(uint64_t));
  size_t at = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    std::memcpy(&offset, offsets.data() + i * sizeof offset, sizeof offset);
    std::memcpy(&bytes, sizes.data() + i * sizeof bytes, sizeof bytes);
    if (bytes > into.size() - at) throw nb::value_error("the buffer is smaller than the runs");
    runs[i] = {offset, static_cast<size_t>(bytes), into.data() + at};
    at += static_cast<size_t>(bytes);
  }
  if (at != into.size()) throw nb::value_error("the buffer is larger than the runs");
  return runs;
}

// Reads rows of four uint64: the file's place in `files`, offset, size, place in `into`.
std::vector<SealedRun> sealed_runs(const std::vector<SealedFileReader*>& files,
                                   const BufferView& rows, const BufferView& into) {
  constexpr size_t kRow = 4 * sizeof(uint64_t);
  if (rows.size() % kRow != 0) throw nb::value_error("a run is four numbers of 64 bits");
  std::vector<SealedRun> runs(rows.size() / kRow);
  for (size_t i = 0; i < runs.size(); ++i) {
    uint64_t row[4];
    std::memcpy(row, rows.data() + i * kRow, kRow);
    if (row[0] >= files.size() || files[row[0]] == nullptr)
      throw nb::value_error("a run names no file of the list");
    if (row[3] > into.size() || row[2] > into.size() - row[3]) {
      throw nb::value_error("a run reaches out of the buffer");
    }
    runs[i] = {files[row[0]], row[1], static_cast<size_t>(row[2]), into.data() + row[3]};
  }
  return runs;
}

}  // namespace

void bind_vault(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const SealedFileError& error) {
      set_python_error(error);
    } catch (const std::system_error& error) {
      set_os_error(error);
    }
  });

  nb::class_<SealedFileWriter>(m, "SealedFileWriter")
      .def(
          "__init__",
          [](SealedFileWriter* self, int file, const SecretBytes& key, const std::string& suite,
             const nb::bytes& context, std::string name, int threads, const nb::object& hash) {
            new (self)
                SealedFileWriter(file, key_from(key, "a sealed file's key"), suite_named(suite),
                                 span_of(context), std::move(name), thread_count(threads),
                                 hash.is_none() ? ChunkHash() : hash_from(hash));
          },
          "file"_a, "key"_a, "suite"_a, "context"_a, "name"_a, "threads"_a = 0,
          "hash"_a = nb::none())
      .def("write", &write_pieces, "pieces"_a)
      .def("finish", &SealedFileWriter::finish, nb::call_guard<nb::gil_scoped_release>())
      // These calls run without the GIL: a write that they wait for may call a Python function.
      .def("take",
           [](SealedFileWriter& self) {
             return array_bytes(unlocked(self, &SealedFileWriter::take));
           })
      .def_prop_ro("commitment",
                   [](const SealedFileWriter& self) { return array_bytes(self.commitment()); })
      .def_prop_ro("digests",
                   [](const SealedFileWriter& self) {
                     return array_bytes(unlocked(self, &SealedFileWriter::digests));
                   })
      .def_prop_ro("length", [](const SealedFileWriter& self) {
        return unlocked(self, &SealedFileWriter::length);
      });

  nb::class_<SealedFileReader>(m, "SealedFileReader")
      .def(
          "__init__",
          [](SealedFileReader* self, const nb::object& source, const SecretBytes& key,
             const std::string& suite, const nb::bytes& context, std::string name, int threads,
             int64_t size) {
            const bool file = nb::isinstance<nb::int_>(source);
            const int descriptor = file ? nb::cast<int>(source) : -1;
            auto read = file ? SealedFileReader::from_file(descriptor, name)
                             : from_python(nb::cast<nb::callable>(source), name);
            const uint64_t bytes = file ? file_size(descriptor, name) : static_cast<uint64_t>(size);
            const KeyBytes input = key_from(key, "a sealed file's key");
            const Suite chosen = suite_named(suite);
            const auto associated = span_of(context);
            const nb::gil_scoped_release released;
            new (self) SealedFileReader(std::move(read), bytes, input, chosen, associated,
                                        std::move(name), thread_count(threads));
          },
          "source"_a, "key"_a, "suite"_a, "context"_a, "name"_a, "threads"_a = 0, "size"_a = 0)
      .def(
          "expect",
          [](SealedFileReader& self, const nb::bytes& digests, const nb::object& hash) {
            const auto list = span_of(digests);
            self.expect({list.begin(), list.end()}, hash_from(hash));
          },
          "digests"_a, "hash"_a = "sha256")
      .def(
          "read_boxes",
          [](SealedFileReader& self, const nb::sequence& wanted) {
            Views views;
            std::vector<WantedRun> runs;
            for (const nb::handle each : wanted) {
              const auto box = nb::cast<nb::tuple>(each);
              views.add(box[0], true);
              add_runs(runs, box, views[views.size() - 1]);
            }
            const nb::gil_scoped_release released;
            self.read(runs);
          },
          "wanted"_a)
      .def(
          "read_into",
          [](SealedFileReader& self, uint64_t offset, const nb::object& into) {
            const BufferView view(into, true);
            const WantedRun run{offset, view.size(), view.data()};
            const nb::gil_scoped_release released;
            self.read({&run, 1}, Seen::by_this_process);
          },
          "offset"_a, "into"_a)
      .def(
          "read_runs",
          [](SealedFileReader& self, const nb::object& offsets, const nb::object& sizes,
             const nb::object& into) {
            const BufferView starts(offsets, false);
            const BufferView lengths(sizes, false);
            const BufferView room(into, true);
            const auto runs = packed_runs(starts, lengths, room);
            const nb::gil_scoped_release released;
            self.read(runs, Seen::by_this_process);
          },
          "offsets"_a, "sizes"_a, "into"_a)
      .def("verify", &SealedFileReader::verify, "first"_a, "count"_a,
           nb::call_guard<nb::gil_scoped_release>())
      // close() runs without the GIL: a read that it waits for may call a Python function.
      .def("close", &SealedFileReader::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("chunks", &SealedFileReader::chunks)
      .def_prop_ro("length", &SealedFileReader::length)
      .def_prop_ro("bytes_read", &SealedFileReader::bytes_read)
      .def_prop_ro("commitment",
                   [](const SealedFileReader& self) { return array_bytes(self.commitment()); });

  m.def(
      "copy_sealed",
      [](const std::vector<SealedFileReader*>& files, const nb::object& runs,
         const nb::object& into, int threads) {
        const BufferView rows(runs, false);
        const BufferView room(into, true);
        const auto wanted = sealed_runs(files, rows, room);
        const nb::gil_scoped_release released;
        copy_sealed(wanted, thread_count(threads));
      },
      "files"_a, "runs"_a, "into"_a, "threads"_a);
  m.def(
      "wrap_key",
      [](const SecretBytes& wrapping, const SecretBytes& key) {
        return array_bytes(wrap_key(key_from(wrapping, "a wrapping key"), key));
      },
      "wrapping"_a, "key"_a, "AES-256 key wrap with padding (RFC 5649).");
  m.def(
      "unwrap_key",
      [](const SecretBytes& wrapping, const nb::bytes& wrapped) -> nb::object {
        auto key = unwrap_key(key_from(wrapping, "a wrapping key"), span_of(wrapped));
        if (!key) return nb::none();
        return nb::cast(std::move(*key));
      },
      "wrapping"_a, "wrapped"_a, "None where it was not wrapped under this key.");
  m.def(
      "chunk_digests",
      [](const nb::object& plain, const nb::object& hash) {
        const BufferView view(plain, false);
        const ChunkHash with = hash_from(hash);
        const auto digests = [&] {
          const nb::gil_scoped_release released;
          return chunk_digests({view.data(), view.size()}, with, usable_cpus());
        }();
        return array_bytes(digests);
      },
      "plain"_a, "hash"_a = "sha256",
      "The digest of every chunk that a sealed file of these bytes has.");
  m.def("sealed_length", &sealed_length, "plain"_a);
}
