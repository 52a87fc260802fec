// The kernels for avx512; CMakeLists.txt gives this file its compiler flags.
#define KDN_LANES 16
#define KDN_NAMESPACE kdn_avx512
#include "kernels.h"

namespace kdn {
extern const Kernels avx512;
constexpr Kernels table = kdn_avx512::kernels("avx512");
const Kernels avx512 = table;
}
