// Stores a job, works on it and acks it, with stubs generated as docs/clients.md says.
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import {
  type CallOptions,
  type ChannelOptions,
  type ClientUnaryCall,
  credentials,
  Metadata,
  type ServiceError,
  status,
} from "@grpc/grpc-js";
import { v7 } from "uuid";
import { BadRequest } from "./gen/google/rpc/error_details.js";
import { Status } from "./gen/google/rpc/status.js";
import { jobAnswerToJSON, type LeasedJob, NewJob } from "./gen/windrow/v1/job.js";
import { AckRequest, DequeueRequest, EnqueueRequest, QueueClient } from "./gen/windrow/v1/queue.js";

const ORG = "acme";
const QUEUE = "cards-grpc-js";
const TRIES_MAX = 60;
const TRY_MS = 10_000;
const WAIT_S = 20;

const options: ChannelOptions = {
  "grpc.keepalive_time_ms": 10_000,
  "grpc.keepalive_timeout_ms": 8_000,
  "grpc.keepalive_permit_without_calls": 1,
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 2_000,
  "grpc.max_receive_message_length": 16 * 1024 * 1024,
  "grpc.service_config": readFileSync("proto/windrow/v1/service_config.json", "utf8"),
};

// After these codes it is useless to try again. After other codes it is safe, because of ids and lease tokens.
const FINAL = new Set([
  status.INVALID_ARGUMENT,
  status.UNIMPLEMENTED,
  status.UNAUTHENTICATED,
  status.PERMISSION_DENIED,
]);

type Answered<T> = (error: ServiceError | null, response: T) => void;
type Method<Q, A> = (request: Q, metadata: Metadata, options: Partial<CallOptions>, answered: Answered<A>) => ClientUnaryCall;

/** Repeats a call until there is an answer. Each try has a deadline of its own. */
async function call<Q, A>(method: Method<Q, A>, request: Q, deadlineMs = TRY_MS): Promise<A> {
  for (let tries = 1, pauseMs = 50; ; tries++, pauseMs = Math.min(2 * pauseMs, 2_000)) {
    try {
      return await new Promise((resolve, reject) => {
        const deadline = Date.now() + deadlineMs;
        method(request, new Metadata(), { deadline }, (error, response) => (error ? reject(error) : resolve(response)));
      });
    } catch (error) {
      const { code } = error as ServiceError;
      if (FINAL.has(code) || tries === TRIES_MAX) throw error;
      console.error("another try after", status[code]);
      await sleep(pauseMs * (0.5 + Math.random() / 2));
    }
  }
}

/** Returns the fields that a router refused. */
function violations(error: ServiceError): string[] {
  const [details] = error.metadata.get("grpc-status-details-bin");
  return Status.decode(details as Buffer)
    .details.filter((detail) => detail.typeUrl.endsWith("/google.rpc.BadRequest"))
    .flatMap((detail) => BadRequest.decode(detail.value).fieldViolations)
    .map((violation) => violation.field);
}

const client = new QueueClient(process.env.WINDROW_ADDRESS ?? "127.0.0.1:7419", credentials.createInsecure(), options);

const job = NewJob.create({ id: v7(), template: { queue: QUEUE, kind: "card", payload: Buffer.from("ada") } });
const stored = await call(client.enqueue.bind(client), EnqueueRequest.create({ org: ORG, jobs: [job] }));
console.log("stored", stored.results[0].id);

const request = DequeueRequest.create({ org: ORG, queues: [QUEUE], wait: { seconds: BigInt(WAIT_S) } });
let jobs: LeasedJob[] = [];
// Repeat the call: a router that shuts down answers without jobs.
while (jobs.length === 0) ({ jobs } = await call(client.dequeue.bind(client), request, WAIT_S * 1000 + TRY_MS));
for (const { lease, payload } of jobs) {
  console.log("a card to", payload.toString());
  const acked = await call(client.ack.bind(client), AckRequest.create({ org: ORG, acks: [{ lease }] }));
  console.log("acked", jobAnswerToJSON(acked.answers[0]));
}

try {
  const bad = NewJob.create({ template: { queue: "?", kind: "card" } });
  await call(client.enqueue.bind(client), EnqueueRequest.create({ org: ORG, jobs: [bad] }));
} catch (error) {
  console.log("refused", ...violations(error as ServiceError));
}
client.close();
