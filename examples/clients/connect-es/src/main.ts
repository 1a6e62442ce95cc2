// Stores a job, works on it and acks it, with stubs generated as docs/clients.md says.
import { setTimeout as sleep } from "node:timers/promises";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { v7 } from "uuid";
import { BadRequestSchema } from "./gen/google/rpc/error_details_pb.js";
import { JobAnswer, type LeasedJob } from "./gen/windrow/v1/job_pb.js";
import { Queue } from "./gen/windrow/v1/queue_pb.js";

const ORG = "acme";
const QUEUE = "cards-connect-es";
const TRIES_MAX = 60;
const TRY_MS = 10_000;
const WAIT_S = 20;

const transport = createGrpcTransport({
  baseUrl: `http://${process.env.WINDROW_ADDRESS ?? "127.0.0.1:7419"}`,
  pingIntervalMs: 10_000,
  pingTimeoutMs: 8_000,
  pingIdleConnection: true,
  readMaxBytes: 16 * 1024 * 1024,
});

// After these codes it is useless to try again. After other codes it is safe, because of ids and lease tokens.
const FINAL = new Set([Code.InvalidArgument, Code.Unimplemented, Code.Unauthenticated, Code.PermissionDenied]);

/** Repeats a call until there is an answer. Each try has a deadline of its own. */
async function call<A>(method: (options: { timeoutMs: number }) => Promise<A>, timeoutMs = TRY_MS): Promise<A> {
  for (let tries = 1, pauseMs = 50; ; tries++, pauseMs = Math.min(2 * pauseMs, 2_000)) {
    try {
      return await method({ timeoutMs });
    } catch (error) {
      const { code } = ConnectError.from(error);
      if (FINAL.has(code) || tries === TRIES_MAX) throw error;
      console.error("another try after", Code[code]);
      await sleep(pauseMs * (0.5 + Math.random() / 2));
    }
  }
}

const client = createClient(Queue, transport);

const template = { queue: QUEUE, kind: "card", payload: new TextEncoder().encode("ada") };
const job = { id: v7(), template };
const stored = await call((options) => client.enqueue({ org: ORG, jobs: [job] }, options));
console.log("stored", stored.results[0].id);

const request = { org: ORG, queues: [QUEUE], wait: { seconds: BigInt(WAIT_S) } };
let jobs: LeasedJob[] = [];
// Repeat the call: a router that shuts down answers without jobs.
while (jobs.length === 0) {
  ({ jobs } = await call((options) => client.dequeue(request, options), WAIT_S * 1000 + TRY_MS));
}
for (const { lease, payload } of jobs) {
  console.log("a card to", new TextDecoder().decode(payload));
  const acked = await call((options) => client.ack({ org: ORG, acks: [{ lease }] }, options));
  console.log("acked", `JOB_ANSWER_${JobAnswer[acked.answers[0]]}`);
}

try {
  await call((options) => client.enqueue({ org: ORG, jobs: [{ template: { queue: "?", kind: "card" } }] }, options));
} catch (error) {
  const refused = ConnectError.from(error).findDetails(BadRequestSchema);
  console.log("refused", ...refused.flatMap((bad) => bad.fieldViolations.map((violation) => violation.field)));
}
process.exit();
