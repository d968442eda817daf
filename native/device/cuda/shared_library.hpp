// A library that is looked up at run time: sealring builds and works where it is not installed.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace sealring {

class SharedLibrary {
 public:
  SharedLibrary(std::string name, const char* file)
      : name_(std::move(name)), handle_(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw std::runtime_error(name_ + ", " + file + ", is not installed");
  }

  // Sets `function` to nullptr if the library has no such symbol.
  template <typename Function>
  void look_for(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(dlsym(handle_, symbol));
  }
  template <typename Function>
  void find(Function& function, const char* symbol) const {
    look_for(function, symbol);
    if (function == nullptr) {
      throw std::runtime_error(name_ + " is too old: it has no " + symbol);
    }
  }

 private:
  std::string name_;
  void* handle_;
};

}  // namespace sealring
