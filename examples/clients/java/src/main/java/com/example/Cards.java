package com.example;

import com.github.f4b6a3.uuid.UuidCreator;
import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import dev.windrow.v1.Ack;
import dev.windrow.v1.AckRequest;
import dev.windrow.v1.DequeueRequest;
import dev.windrow.v1.EnqueueRequest;
import dev.windrow.v1.JobTemplate;
import dev.windrow.v1.LeasedJob;
import dev.windrow.v1.NewJob;
import dev.windrow.v1.QueueGrpc;
import dev.windrow.v1.QueueGrpc.QueueBlockingStub;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/** Stores a job, works on it and acks it, with stubs generated as docs/clients.md says. */
public final class Cards {
  private static final String ORG = "acme";
  private static final String QUEUE = "cards-java";
  private static final int TRIES_MAX = 60;
  private static final int TRY_S = 10;
  private static final int WAIT_S = 20;

  /** After these codes it is useless to try again. After other codes it is safe, because of ids and lease tokens. */
  private static final Set<Status.Code> FINAL =
      Set.of(
          Status.Code.INVALID_ARGUMENT,
          Status.Code.UNIMPLEMENTED,
          Status.Code.UNAUTHENTICATED,
          Status.Code.PERMISSION_DENIED);

  private final ManagedChannel channel;

  private Cards(ManagedChannel channel) {
    this.channel = channel;
  }

  private static ManagedChannel connect(String address) throws IOException {
    String serviceConfig = Files.readString(Path.of("proto/windrow/v1/service_config.json"));
    return Grpc.newChannelBuilder(address, InsecureChannelCredentials.create())
        .keepAliveTime(10, TimeUnit.SECONDS)
        .keepAliveTimeout(8, TimeUnit.SECONDS)
        .keepAliveWithoutCalls(true)
        .maxInboundMessageSize(16 << 20)
        .defaultServiceConfig(new Gson().<Map<String, ?>>fromJson(serviceConfig, Map.class))
        .enableRetry()
        .build();
  }

  /** Repeats a call until there is an answer. Each try has a deadline of its own. */
  private <A> A call(Function<QueueBlockingStub, A> method, int deadlineS) throws InterruptedException {
    long pauseMs = 50;
    for (int tries = 1; ; tries++) {
      try {
        return method.apply(QueueGrpc.newBlockingStub(channel).withDeadlineAfter(deadlineS, TimeUnit.SECONDS));
      } catch (StatusRuntimeException error) {
        Status.Code code = error.getStatus().getCode();
        if (FINAL.contains(code) || tries == TRIES_MAX) {
          throw error;
        }
        System.err.println("another try after " + code);
        Thread.sleep(ThreadLocalRandom.current().nextLong(pauseMs / 2, pauseMs));
        pauseMs = Math.min(2 * pauseMs, 2_000);
        // Without this, the channel would wait up to 120 s before it connects again.
        channel.resetConnectBackoff();
      }
    }
  }

  private void run() throws InterruptedException, InvalidProtocolBufferException {
    NewJob job =
        NewJob.newBuilder()
            .setId(UuidCreator.getTimeOrderedEpoch().toString())
            .setTemplate(
                JobTemplate.newBuilder()
                    .setQueue(QUEUE)
                    .setKind("card")
                    .setPayload(ByteString.copyFromUtf8("ada")))
            .build();
    EnqueueRequest enqueue = EnqueueRequest.newBuilder().setOrg(ORG).addJobs(job).build();
    System.out.println("stored " + call(stub -> stub.enqueue(enqueue), TRY_S).getResults(0).getId());

    DequeueRequest dequeue =
        DequeueRequest.newBuilder()
            .setOrg(ORG)
            .addQueues(QUEUE)
            .setWait(Duration.newBuilder().setSeconds(WAIT_S))
            .build();
    List<LeasedJob> jobs = List.of();
    while (jobs.isEmpty()) { // Repeat the call: a router that shuts down answers without jobs.
      jobs = call(stub -> stub.dequeue(dequeue), WAIT_S + TRY_S).getJobsList();
    }
    for (LeasedJob leased : jobs) {
      System.out.println("a card to " + leased.getPayload().toStringUtf8());
      AckRequest ack =
          AckRequest.newBuilder().setOrg(ORG).addAcks(Ack.newBuilder().setLease(leased.getLease())).build();
      System.out.println("acked " + call(stub -> stub.ack(ack), TRY_S).getAnswers(0));
    }

    NewJob bad = NewJob.newBuilder().setTemplate(JobTemplate.newBuilder().setQueue("?").setKind("card")).build();
    EnqueueRequest refused = EnqueueRequest.newBuilder().setOrg(ORG).addJobs(bad).build();
    try {
      call(stub -> stub.enqueue(refused), TRY_S);
    } catch (StatusRuntimeException error) {
      for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(BadRequest.class)) {
          System.out.println("refused " + detail.unpack(BadRequest.class).getFieldViolations(0).getField());
        }
      }
    }
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel = connect(System.getenv().getOrDefault("WINDROW_ADDRESS", "127.0.0.1:7419"));
    new Cards(channel).run();
    channel.shutdown().awaitTermination(TRY_S, TimeUnit.SECONDS);
  }
}
