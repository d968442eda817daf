#include "record/names.hpp"

#include "reduce/reduce.hpp"

namespace sealring {
namespace {

std::string name_in(const std::map<uint8_t, std::string>& names, uint8_t code, const char* kind) {
  const auto found = names.find(code);
  return found != names.end() ? found->second : std::string(kind) + " " + std::to_string(code);
}

}  // namespace

std::string Names::rank(int64_t rank) const {
  const bool known = rank >= 0 && static_cast<uint64_t>(rank) < members.size();
  return "rank " + std::to_string(known ? members[static_cast<size_t>(rank)] : rank);
}

std::string Names::view(const View& view) const {
  const char* const dtype = name_of(static_cast<DType>(view.dtype));
  const char* const reduction = name_of(static_cast<ReduceKind>(view.reduction));
  std::string text = "collective " + std::to_string(view.number) + " (" +
                     name_in(operations, view.operation, "operation");
  if (view.reduction != 0) {
    text += reduction != nullptr ? std::string(" ") + reduction
                                 : " reducekind " + std::to_string(view.reduction);
  }
  if (rooted.contains(view.operation)) text += " at root " + std::to_string(view.root);
  return text + " of " + std::to_string(view.total) + " bytes of " +
         (dtype != nullptr ? dtype : "dtype " + std::to_string(view.dtype)) + ", " +
         name_in(algorithms, view.algorithm, "algorithm") + ")";
}

std::string Names::remark(std::initializer_list<uint8_t> named) const {
  for (uint8_t operation : named) {
    if (const auto found = remarks.find(operation); found != remarks.end()) return found->second;
  }
  return "";
}

}  // namespace sealring
