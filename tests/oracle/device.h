// A rank's memory on a device, for the oracle: ops go there and results come back.
#ifndef FRUGAL_TESTS_ORACLE_DEVICE_H_
#define FRUGAL_TESTS_ORACLE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace frugal_oracle {

class RankDevice {
 public:
  virtual ~RankDevice() = default;
  // The stream that the rank uses now. Now and then it is another.
  virtual void* Stream() = 0;
  // A copy of host memory on the device, made in the stream; good until Collect(). Its address is a
  // multiple of `align`, and often of no more.
  virtual void* Send(const void* host, size_t bytes, size_t align) = 0;
  // The same memory is written over, in the stream.
  virtual void Spoil(void* device, size_t bytes) = 0;
  // Copies back; it is there after Collect().
  virtual void Fetch(void* host, const void* device, size_t bytes) = 0;
  // Waits for the streams. Whatever was sent is given back.
  virtual void Collect() = 0;
  // The first thing that went wrong, or empty.
  virtual std::string Error() = 0;
  virtual void Forgive() = 0;  // forgets it
};

// Whether OpenDevice() has any. Else ranks on devices have all memory of their ops on the host.
extern const bool kDeviceMemory;

// `name` as a trainer's device.
std::unique_ptr<RankDevice> OpenDevice(const std::string& name, uint64_t seed);

// In mode AUTO: do steps of few bytes, as all here are, go the way of small ones, or that of large
// ones? Where only the C ABI is seen they are small.
void TakeStepsAsSmall(bool small);

// Do gates wait for each copy of a checkpoint that waits for the disk? Likewise; there they do not.
void WaitForCopies(bool wait);

}  // namespace frugal_oracle

#endif  // FRUGAL_TESTS_ORACLE_DEVICE_H_
