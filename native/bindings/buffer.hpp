// Access to the memory of Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

namespace sealring {

// A view of a Python object's memory, for as long as the view exists.
class BufferView {
 public:
  BufferView(const nanobind::object& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw nanobind::python_error();
    }
  }
  ~BufferView() { PyBuffer_Release(&buffer_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(buffer_.buf); }
  size_t size() const { return static_cast<size_t>(buffer_.len); }

 private:
  Py_buffer buffer_;
};

}  // namespace sealring
