// Bindings of keys for kernels that Python launches: keys of sealed files, and of what is offloaded to host
// memory.
#include "bindings/bind.hpp"
#include "bindings/secrets.hpp"
#include "device/cuda/key_memory.hpp"
#include "vault/sealed_file_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sealring;

void bind_gpu_keys(nb::module_& m) {
  nb::class_<KeyMemory>(m, "GpuKeys")
      .def(nb::new_([](int ordinal, size_t entries) {
             return owned_here<KeyMemory>(cuda::driver(), ordinal, entries);
           }),
           "ordinal"_a, "entries"_a)
      .def(
          "add",
          [](KeyMemory& self, const SecretBytes& key) { self.add(key_from(key, "a key"), {}); },
          "key"_a)
      .def(
          "add_file",
          [](KeyMemory& self, const SealedFileReader& file) {
            const FileKey key = file.key();
            if (key.suite != Suite::chacha20_poly1305) {
              throw nb::value_error("a GPU opens files of AEAD_CHACHA20_POLY1305 alone");
            }
            self.add(key.key, key.base);
          },
          "file"_a)
      .def(
          "use_until",
          [](KeyMemory& self, uint64_t stream) {
            self.use_until(reinterpret_cast<cuda::Handle>(stream));
          },
          "stream"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("wipe", &KeyMemory::wipe, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("start", &KeyMemory::start);
}
