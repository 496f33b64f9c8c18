#include "elementwise.h"

namespace anabranch {

namespace plain {
extern const ElementOps element_table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const ElementOps element_table;
}
namespace avx512 {
extern const ElementOps element_table;
}
#endif

const ElementOps& element_ops() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return avx512::element_table;
  if (isa() == Isa::avx2) return avx2::element_table;
#endif
  return plain::element_table;
}

}  // namespace anabranch
