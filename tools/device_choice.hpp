// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace distmoe::tools {

/// The GPU of a rank that is a thread: ranks take turns, and share where there are fewer.
int device_of_thread(int rank);

/// The GPU of a rank that is a process: the launcher numbers the processes of a host; `rank` serves
/// where it does not.
int device_of_process(int rank);

}  // namespace distmoe::tools
