// The kernels for avx2; CMakeLists.txt gives this file its compiler flags.
#define KDN_LANES 8
#define KDN_NAMESPACE kdn_avx2
#include "kernels.h"

namespace kdn {
extern const Kernels avx2;
constexpr Kernels table = kdn_avx2::kernels("avx2");
const Kernels avx2 = table;
}
