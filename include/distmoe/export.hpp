// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks what a shared libdistmoe exports; everything else has hidden visibility.
#if defined(__GNUC__)
#define DISTMOE_EXPORT __attribute__((visibility("default")))
#else
#define DISTMOE_EXPORT
#endif
