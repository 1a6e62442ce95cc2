// The loop of a peer written for node. It reads and writes frames until standard input ends. ../wire.py describes the
// frames, and ../python/serve.py says what a peer must do.

import { createRequire } from "node:module";
import { Socket } from "node:net";
import { pathToFileURL } from "node:url";

const CALL = 1, ENQUEUE = 2, ANSWER = 3, TAKEN = 4, FINISHED = 5;
const HEAD_BYTES = 5;
// One frame reports many jobs. A job is reported at most this long after it was taken.
const TELL_MS = 2;
const END_MS_MAX = 5000;

// The client expects only frames: redirect what a library prints to standard error.
for (const level of ["log", "info", "debug"]) console[level] = console.error;
const out = new Socket({ fd: 1, readable: false, writable: true });
out.on("error", () => process.exit(1));
// Ctrl-C reaches every process of the terminal. Ignore it: the client gets it too, and ends this process in order.
process.on("SIGINT", () => {});

/** Loads a package from the folder in which the peers are installed. */
export async function load(name) {
  const require = createRequire(`${process.argv[2]}/`);
  return await import(pathToFileURL(require.resolve(name)).href);
}

/** Collects what a consumer has done, and reports it in batches. */
class Report {
  #payloads = [];
  #times = [];
  #finished = 0;
  #planned = null;

  /** Reports that a handler has this job now. */
  taken(payload) {
    this.#times.push(process.hrtime.bigint());
    this.#payloads.push(payload);
    this.#plan();
  }

  /** Reports that this number of further jobs has finished in the database. */
  finished(jobs) {
    this.#finished += jobs;
    this.#plan();
  }

  tell() {
    clearTimeout(this.#planned);
    this.#planned = null;
    const count = this.#payloads.length;
    if (count) {
      let bytes = 4 + 4 * count + 8 * count;
      for (const payload of this.#payloads) bytes += payload.length;
      const body = Buffer.allocUnsafe(bytes);
      let at = body.writeUInt32LE(count, 0);
      for (const payload of this.#payloads) at = body.writeUInt32LE(payload.length, at);
      for (const payload of this.#payloads) at += body.latin1Write(payload, at);
      for (const time of this.#times) at = body.writeBigInt64LE(time, at);
      send(TAKEN, body);
      this.#payloads = [];
      this.#times = [];
    }
    if (this.#finished) {
      const body = Buffer.allocUnsafe(4);
      body.writeUInt32LE(this.#finished);
      send(FINISHED, body);
      this.#finished = 0;
    }
  }

  #plan() {
    this.#planned ??= setTimeout(() => this.tell(), TELL_MS);
  }
}

function send(kind, body) {
  const head = Buffer.allocUnsafe(HEAD_BYTES);
  head.writeUInt32LE(body.length, 0);
  head.writeUInt8(kind, 4);
  out.cork();
  out.write(head);
  out.write(body);
  out.uncork();
}

function answer(id, told) {
  send(ANSWER, Buffer.from(JSON.stringify({ id, ...told })));
}

function unpack(body, at) {
  const count = body.readUInt32LE(at);
  let from = at + 4 + 4 * count;
  const payloads = new Array(count);
  for (let i = 0; i < count; i++) {
    const to = from + body.readUInt32LE(at + 4 + 4 * i);
    payloads[i] = body.latin1Slice(from, to);
    from = to;
  }
  return payloads;
}

export async function serve(peer) {
  const report = new Report();
  let working = Promise.resolve();

  async function act(id, action) {
    try {
      const value = await action();
      answer(id, { value: value ?? null });
    } catch (error) {
      answer(id, { error: String(error?.stack ?? error).slice(0, 2000) });
    }
  }

  async function rest() {
    await peer.rest();
    await working;
    report.tell();
  }

  function receive(kind, body) {
    if (kind === ENQUEUE) {
      void act(body.readUInt32LE(0), () => peer.enqueue(unpack(body, 4)));
      return;
    }
    const { id, verb, ...given } = JSON.parse(body.toString());
    if (verb === "work") working = act(id, () => peer.work(given, report));
    else if (verb === "rest") void act(id, rest);
    else void act(id, () => peer[verb](given));
  }

  let got = Buffer.alloc(0);
  for await (const chunk of process.stdin) {
    got = got.length ? Buffer.concat([got, chunk]) : chunk;
    let at = 0;
    while (got.length - at >= HEAD_BYTES) {
      const end = at + HEAD_BYTES + got.readUInt32LE(at);
      if (got.length < end) break;
      receive(got.readUInt8(at + 4), got.subarray(at + HEAD_BYTES, end));
      at = end;
    }
    got = got.subarray(at);
  }
  setTimeout(() => process.exit(0), END_MS_MAX);
  await rest().catch(() => {});
  await peer.close().catch(() => {});
  process.exit(0);
}
