// Pointers of callers that are memory of a GPU, where host memory is meant.
//
// What: a host access of such memory is a crash, so whoever takes pointers asks first. Answers
// without a device of ours: the program may use GPUs while the engine does not. Invariants:
// initializes no driver and no context; without a GPU in use it costs a load. Threads: any.
// Callers: calls of trainers on the cpu device, and operations outside steps.
#ifndef FRUGAL_DEVICE_POINTERS_H_
#define FRUGAL_DEVICE_POINTERS_H_

namespace frugal::device {

// Finds out whether the process uses GPUs by now: about 100 ns where nothing has been loaded since.
void look_for_devices();

// May there be memory that the host cannot touch? No, if devices came after the last look.
bool any_only_on_device();
// Is this some? Likewise.
bool only_on_device(const void* p);

}  // namespace frugal::device

#endif  // FRUGAL_DEVICE_POINTERS_H_
