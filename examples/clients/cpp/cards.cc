// Stores a job, works on it and acks it, with stubs generated as docs/clients.md says.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "windrow/v1/queue.grpc.pb.h"

namespace v1 = windrow::v1;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr char kOrg[] = "acme";
constexpr char kQueue[] = "cards-cpp";
constexpr int kTriesMax = 60;
constexpr seconds kTry{10};
constexpr seconds kWait{20};

std::mt19937_64& Luck() {
  static std::mt19937_64 luck{std::random_device{}()};
  return luck;
}

// A UUIDv7 (RFC 9562): milliseconds since 1970, then random bits.
std::string JobId() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const unsigned long long ms = std::chrono::duration_cast<milliseconds>(now).count();
  const unsigned long long high = Luck()(), low = Luck()();
  char text[37];
  std::snprintf(text, sizeof text, "%08llx-%04llx-7%03llx-%04llx-%012llx", ms >> 16, ms & 0xffff, high & 0xfff,
                0x8000 | (low >> 50), low & 0xffffffffffff);
  return text;
}

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  std::ifstream file("proto/windrow/v1/service_config.json");
  const std::string service_config{std::istreambuf_iterator<char>(file), {}};
  grpc::ChannelArguments options;
  options.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  options.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 8'000);
  options.SetInt("grpc.http2.ping_timeout_ms", 8'000);
  options.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  options.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  options.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  options.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2'000);
  options.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
  options.SetMaxReceiveMessageSize(16 << 20);
  options.SetServiceConfigJSON(service_config);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), options);
}

// Says whether it is useless to try again. If not, it is safe to try again, because of ids and lease tokens.
bool IsFinal(grpc::StatusCode code) {
  return code == grpc::INVALID_ARGUMENT || code == grpc::UNIMPLEMENTED || code == grpc::UNAUTHENTICATED ||
         code == grpc::PERMISSION_DENIED;
}

// Repeats a call until there is an answer. Each try has a deadline of its own.
template <typename Request, typename Response>
grpc::Status Call(v1::Queue::Stub& stub,
                  grpc::Status (v1::Queue::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                  const Request& request, Response* response, seconds deadline = kTry) {
  milliseconds pause{50};
  for (int tries = 1;; ++tries) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + deadline);
    const grpc::Status status = (stub.*method)(&context, request, response);
    if (status.ok() || IsFinal(status.error_code()) || tries == kTriesMax) return status;
    std::cerr << "another try after " << status.error_code() << std::endl;
    std::this_thread::sleep_for(pause * std::uniform_real_distribution<>(0.5, 1.0)(Luck()));
    pause = std::min<milliseconds>(2 * pause, seconds{2});
  }
}

v1::EnqueueRequest OneJob(const std::string& queue) {
  v1::EnqueueRequest request;
  request.set_org(kOrg);
  v1::NewJob* job = request.add_jobs();
  job->set_id(JobId());
  v1::JobTemplate* what = job->mutable_template_();
  what->set_queue(queue);
  what->set_kind("card");
  what->set_payload("ada");
  return request;
}

int Fail(const grpc::Status& status) {
  std::cerr << status.error_message() << std::endl;
  return 1;
}

int main() {
  const char* address = std::getenv("WINDROW_ADDRESS");
  v1::Queue::Stub stub(Connect(address ? address : "127.0.0.1:7419"));

  v1::EnqueueResponse stored;
  grpc::Status status = Call(stub, &v1::Queue::Stub::Enqueue, OneJob(kQueue), &stored);
  if (!status.ok()) return Fail(status);
  std::cout << "stored " << stored.results(0).id() << std::endl;

  v1::DequeueRequest request;
  request.set_org(kOrg);
  request.add_queues(kQueue);
  request.mutable_wait()->set_seconds(kWait.count());
  v1::DequeueResponse leased;
  while (leased.jobs().empty()) {  // Repeat the call: a router that shuts down answers without jobs.
    status = Call(stub, &v1::Queue::Stub::Dequeue, request, &leased, kWait + kTry);
    if (!status.ok()) return Fail(status);
  }
  for (const v1::LeasedJob& job : leased.jobs()) {
    std::cout << "a card to " << job.payload() << std::endl;
    v1::AckRequest ack;
    ack.set_org(kOrg);
    ack.add_acks()->set_lease(job.lease());
    v1::AckResponse acked;
    status = Call(stub, &v1::Queue::Stub::Ack, ack, &acked);
    if (!status.ok()) return Fail(status);
    std::cout << "acked " << v1::JobAnswer_Name(acked.answers(0)) << std::endl;
  }

  status = Call(stub, &v1::Queue::Stub::Enqueue, OneJob("?"), &stored);
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  for (const google::protobuf::Any& detail : details.details()) {
    google::rpc::BadRequest bad;
    if (detail.UnpackTo(&bad)) std::cout << "refused " << bad.field_violations(0).field() << std::endl;
  }
}
