// graphile-worker with local queue and batched completion, as its performance page runs it. See ../README.md.

import { load, serve } from "./serve.mjs";

const { Logger, makeWorkerUtils, run, runMigrations } = await load("graphile-worker");
const { default: pg } = await load("pg");

const CONCURRENT_JOBS = 24;
// The local queue holds this many batches. With batches of 100 jobs, these are the 500 jobs that the performance page
// has.
const LOCAL_QUEUE_BATCHES = 5;
// Adds jobs as graphile-worker's own performance test does. The library's addJobs() would fetch every row that it made.
const ADD_JOBS = {
  name: "add-jobs",
  text: `SELECT 1 FROM graphile_worker.add_jobs(
    array(SELECT json_populate_recordset(null::graphile_worker.job_spec, $1::json)))`,
};
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(message);
});

class Peer {
  async open({ dsn, connections }) {
    this.dsn = dsn;
    this.pool = new pg.Pool({ connectionString: dsn, max: connections + 1 });
    this.pool.on("error", console.error);
    this.pool.on("connect", (client) => client.on("error", console.error));
  }

  async prepare({ run: name }) {
    this.run = name;
    await runMigrations({ pgPool: this.pool, logger });
    this.utils ??= await makeWorkerUtils({ pgPool: this.pool, logger });
  }

  async enqueue(payloads) {
    if (payloads.length === 1) {
      await this.utils.addJob(this.run, { p: payloads[0] });
      return;
    }
    const identifier = this.run;
    const specs = JSON.stringify(payloads.map((p) => ({ identifier, payload: { p } })));
    const { rowCount } = await this.pool.query({ ...ADD_JOBS, values: [specs] });
    if (rowCount !== payloads.length) throw new Error(`${rowCount} of ${payloads.length} jobs were stored`);
  }

  async work({ batch }, report) {
    const pgPool = new pg.Pool({ connectionString: this.dsn, max: CONCURRENT_JOBS + 1 });
    pgPool.on("error", console.error);
    // graphile-worker reports a job as complete before it deletes a batch of jobs. Therefore count the deletions.
    pgPool.on("connect", (client) => {
      client.on("error", console.error);
      const query = client.query;
      client.query = function (config, ...others) {
        const answered = query.call(this, config, ...others);
        if (config?.name?.startsWith("complete_job")) {
          answered.then((result) => report.finished(result.rowCount), () => {});
        }
        return answered;
      };
    });
    this.runner = await run({
      pgPool,
      logger,
      noHandleSignals: true,
      taskList: { [this.run]: async (payload) => report.taken(payload.p) },
      crontab: "",
      preset: {
        worker: {
          concurrentJobs: CONCURRENT_JOBS,
          maxPoolSize: CONCURRENT_JOBS + 1,
          localQueue: { size: Math.max(LOCAL_QUEUE_BATCHES * batch, CONCURRENT_JOBS + 1) },
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
        },
      },
    });
    await this.runner.promise;
    this.runner = undefined;
    await pgPool.end();
  }

  async rest() {
    await this.runner?.stop();
  }

  async counts() {
    const sql = "SELECT count(*)::int AS jobs FROM graphile_worker.jobs WHERE task_identifier = $1";
    const { rows } = await this.pool.query(sql, [this.run]);
    return { left: rows[0].jobs, accepted: null, finished: null };
  }

  async close() {
    await this.utils?.release();
    await this.pool?.end();
  }
}

await serve(new Peer());
