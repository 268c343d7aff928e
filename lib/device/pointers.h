// Finds pointers to memory of a GPU among callers' pointers to host memory.
//
// What: a host access of such memory is a crash, so calls check the pointers that they get. It
// needs no device of the engine: the program may use GPUs while the engine does not.
//
// Invariants: initializes no driver and no context; without a GPU in use it costs a load.
// Threads: any.
// Callers: calls of trainers on the cpu device, and operations outside steps.
#ifndef FRUGAL_DEVICE_POINTERS_H_
#define FRUGAL_DEVICE_POINTERS_H_

namespace frugal::device {

// Checks whether the process uses GPUs by now: about 100 ns if nothing was loaded since the last
// time.
void look_for_devices();

// Whether there may be memory that the host cannot touch, as far as look_for_devices() has seen.
bool any_only_on_device();
// Whether `p` is such memory.
bool only_on_device(const void* p);

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_POINTERS_H_
