#include "train/tensorboard.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string_view>

namespace train {
namespace {

// Hand-written protobuf: a field is its number and kind, followed by its value.
enum Kind : unsigned { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void add_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void add_key(std::string& out, unsigned field, Kind kind) { add_varint(out, field << 3 | kind); }

template <typename Value>
void add_fixed(std::string& out, unsigned field, Value value) {
  add_key(out, field, sizeof value == 8 ? kFixed64 : kFixed32);
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

void add_bytes(std::string& out, unsigned field, std::string_view bytes) {
  add_key(out, field, kBytes);
  add_varint(out, bytes.size());
  out.append(bytes);
}

// Event: wall_time 1, step 2, file_version 3, summary 5, session_log 7.
std::string event(int64_t step) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::string out;
  add_fixed(out, 1, std::chrono::duration<double>(now).count());
  add_key(out, 2, kVarint);
  add_varint(out, static_cast<uint64_t>(step));
  return out;
}

uint32_t masked_crc(const void* bytes, size_t count) {
  const uint32_t crc = crc32c(0, bytes, count);
  return (crc >> 15 | crc << 17) + 0xa282ead8;
}

}  // namespace

EventWriter::EventWriter(const std::string& folder, int64_t first_step) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  char host[64] = "localhost";
  gethostname(host, sizeof host - 1);
  // TensorBoard reads the files of a folder in name order.
  char name[160];
  std::snprintf(
      name, sizeof name, "/events.out.tfevents.%010lld.%s.%d.%06lld",
      static_cast<long long>(microseconds / 1000000), host, static_cast<int>(getpid()),
      static_cast<long long>(microseconds % 1000000));
  file_ = std::make_unique<OutputFile>(folder + name);
  std::string version = event(0);
  add_bytes(version, 3, "brain.Event:2");
  record(version);
  std::string start = event(first_step + 1);
  std::string session;
  add_key(session, 1, kVarint);  // status
  add_varint(session, 1);        // START: drop this step and all after it
  add_bytes(start, 7, session);
  record(start);
}

void EventWriter::scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  std::string summary;
  for (const auto& [tag, value] : values) {
    std::string entry;
    add_bytes(entry, 1, tag);
    add_fixed(entry, 2, static_cast<float>(value));  // simple_value
    add_bytes(summary, 1, entry);
  }
  std::string out = event(step);
  add_bytes(out, 5, summary);
  record(out);
}

void EventWriter::record(const std::string& event) {
  const uint64_t length = event.size();
  const uint32_t length_crc = masked_crc(&length, sizeof length);
  const uint32_t event_crc = masked_crc(event.data(), event.size());
  std::string out;
  out.append(reinterpret_cast<const char*>(&length), sizeof length);
  out.append(reinterpret_cast<const char*>(&length_crc), sizeof length_crc);
  out.append(event);
  out.append(reinterpret_cast<const char*>(&event_crc), sizeof event_crc);
  file_->write(out);
}

}  // namespace train
