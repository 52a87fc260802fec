#pragma once
#include "kdn.h"
