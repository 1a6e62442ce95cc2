from __future__ import annotations
import argparse, asyncio, os, sys, threading, signal
import grpc, psycopg
from windrow.v1 import queue_pb2, queue_pb2_grpc
from examples.pushes import tables
from examples.pushes.totals import Push

async def serve(address, database, orgs, window_s, name):
    db = await psycopg.AsyncConnection.connect(database, autocommit=True)
    lock = asyncio.Lock()
    async with grpc.aio.insecure_channel(address) as ch:
        stub = queue_pb2_grpc.QueueStub(ch)
        async def one(org):
            while True:
                try:
                    r = queue_pb2.DequeueRequest(org=org, queues=["pushes"], max_jobs=100, worker=name)
                    r.visibility_window.FromMilliseconds(int(window_s*1000))
                    got = (await stub.Dequeue(r, timeout=5)).jobs
                    if not got:
                        await asyncio.sleep(0.2); continue
                    async with lock:
                        await tables.apply(db, [(j.id, Push.from_json(j.payload)) for j in got])
                    await stub.Ack(queue_pb2.AckRequest(org=org, acks=[queue_pb2.Ack(lease=j.lease) for j in got]), timeout=5)
                except grpc.aio.AioRpcError as e:
                    await asyncio.sleep(0.2)
        async with asyncio.TaskGroup() as g:
            for o in orgs: g.create_task(one(o))

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--address"); p.add_argument("--database"); p.add_argument("--orgs"); p.add_argument("--window-seconds", type=float, default=30); p.add_argument("--name", default="worker")
    a = p.parse_args()
    def watch():
        while os.read(0, 4096): pass
        os._exit(0)
    threading.Thread(target=watch, daemon=True).start()
    asyncio.run(serve(a.address, a.database, a.orgs.split(","), a.window_seconds, a.name))
if __name__ == "__main__": main()
