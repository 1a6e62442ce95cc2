// pg-boss with LISTEN/NOTIFY. After a full batch, a worker fetches the next batch at once. See ../README.md.

import { load, serve } from "./serve.mjs";

const { PgBoss } = await load("pg-boss");

class Peer {
  async open({ dsn, connections }) {
    this.boss = new PgBoss({ connectionString: dsn, max: 2 * connections + 2, useListenNotify: true, schedule: false });
    this.boss.on("error", (error) => console.error(error));
    // pg-boss does not report when a batch is complete. Therefore count what its statement completes.
    this.db = this.boss.getDb();
    const execute = this.db.executeSql;
    this.db.executeSql = async (text, values, ...others) => {
      const result = await execute.call(this.db, text, values, ...others);
      if (this.report && values?.length > 1 && text.includes("SET completed_on")) this.report.finished(values[1].length);
      return result;
    };
    await this.boss.start();
  }

  async prepare({ run }) {
    this.run = run;
    // Give the queue a table of its own: in the common table, the rows of earlier runs would slow this run down.
    await this.boss.createQueue(run, { notify: true, partition: true });
  }

  async enqueue(payloads) {
    await this.boss.insert(this.run, payloads.map((p) => ({ data: { p } })));
  }

  async work({ batch, concurrency }, report) {
    this.report = report;
    const options = {
      // With a batch size of 1, a worker would sleep after each job.
      batchSize: Math.max(batch, 2),
      localConcurrency: concurrency,
      burstWhenBatchFull: true,
      pollingIntervalSeconds: 0.5,
    };
    await this.boss.work(this.run, options, async (jobs) => {
      for (const job of jobs) report.taken(job.data.p);
    });
    await new Promise((resolve) => (this.stop = resolve));
    await this.boss.offWork(this.run, { wait: true });
    this.report = undefined;
  }

  async rest() {
    this.stop?.();
  }

  async counts() {
    const sql = "SELECT state::text, count(*)::int AS jobs FROM pgboss.job WHERE name = $1 GROUP BY state";
    const { rows } = await this.db.executeSql(sql, [this.run]);
    const jobs = Object.fromEntries(rows.map((row) => [row.state, row.jobs]));
    const accepted = rows.reduce((sum, row) => sum + row.jobs, 0);
    const finished = jobs.completed ?? 0;
    return { left: accepted - finished, accepted, finished };
  }

  async close() {
    await this.boss?.stop({ graceful: false });
  }
}

await serve(new Peer());
