// The kernels for baseline; CMakeLists.txt gives this file its compiler flags.
#define KDN_LANES 4
#define KDN_NAMESPACE kdn_baseline
#include "kernels.h"

namespace kdn {
extern const Kernels baseline;
constexpr Kernels table = kdn_baseline::kernels("baseline");
const Kernels baseline = table;
}
