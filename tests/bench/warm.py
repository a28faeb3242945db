"""Scale a fleet of the demo model from 3 to 4 under load, then restart it one by one; say how the new replicas begin.

RATE=3 BEFORE=25 python tests/bench/warm.py TREE PORT
"""
import asyncio, json, os, random, statistics, subprocess, sys, time
import httpx2 as httpx
TREE, PORT = sys.argv[1], int(sys.argv[2])
PREFIXES, PREFIX, OWN, RATE = 24, 1024, 32, float(os.environ.get("RATE", "4"))
BEFORE_S, AFTER_S = float(os.environ.get("BEFORE", "30")), 60.0
env = os.environ | {"PYTHONPATH": TREE}
run = [sys.executable, "-m", "fleet"]
chance = random.Random(7)
heads = [[chance.randrange(10, 1250) for _ in range(PREFIX)] for _ in range(PREFIXES)]
rows = []

async def one(client, sent_s):
    body = {"model": "demo", "prompt": chance.choice(heads) + [chance.randrange(10, 1250) for _ in range(OWN)],
            "max_tokens": 4, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            replica, first, cached = answer.headers.get("x-warmroute-replica"), None, 0
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.monotonic()
                    usage = json.loads(line[6:]).get("usage")
                    if usage: cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            rows.append((sent_s, replica, answer.status_code, (first or 0) - sent_s, cached))
    except httpx.HTTPError as error:
        rows.append((sent_s, None, repr(error), 0.0, 0))

async def load(client, until):
    tasks = []
    while time.monotonic() < until[0]:
        await asyncio.sleep(chance.expovariate(RATE))
        tasks.append(asyncio.create_task(one(client, time.monotonic())))
    await asyncio.gather(*tasks)

def show(name, chosen):
    ok = [row for row in chosen if row[2] == 200]
    if not ok: print(name, "none"); return
    t = sorted(row[3] for row in ok)
    print(f"{name}: {len(ok)} requests, failed {len(chosen)-len(ok)}, hits {sum(r[4] for r in ok)/len(ok)/(PREFIX+OWN):.1%}, TTFT mean {statistics.fmean(t):.3f} p50 {t[len(t)//2]:.3f} p90 {t[int(len(t)*.9)]:.3f} max {t[-1]:.3f}", flush=True)

async def main():
    fleet = subprocess.Popen([*run, "up", "--model", "demo", "--replicas", "3", "--no-ray", "--port", str(PORT), "--log-dir", f"/tmp/warm-logs-{PORT}", "--", "--num-blocks", "8192", "--log-level", "info", "--host-kv-gb", "0"], env=env, cwd="/tmp", stdout=open(f"/tmp/warm-up-{PORT}.out", "w"), stderr=subprocess.STDOUT)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=60, trust_env=False) as client:
            async def replicas():
                try:
                    data = (await client.get("/replicas")).json()
                    return data["replicas"] if isinstance(data, dict) else data
                except Exception: return []
            async def ready(names=()):
                while True:
                    got = {r["name"] for r in await replicas() if r.get("available")}
                    if len(got) >= 3 and set(names) <= got: return got
                    await asyncio.sleep(0.1)
            print(await ready(), flush=True)
            until = [time.monotonic() + BEFORE_S + 90 + AFTER_S]
            going = asyncio.create_task(load(client, until))
            await asyncio.sleep(BEFORE_S)
            show("before", [r for r in rows if r[0] > time.monotonic() - 20])
            asked = time.monotonic()
            subprocess.Popen([*run, "scale", "demo", "4", "--no-wait", "--fleet", f"http://127.0.0.1:{PORT}"], env=env, cwd="/tmp")
            await ready(["demo-3"])
            began = time.monotonic()
            until[0] = began + AFTER_S
            print(f"ready after {began-asked:.1f} s")
            await going
            show("new, first 20 s", [r for r in rows if r[1] == "demo-3" and r[0] < began + 20])
            show("new, first minute", [r for r in rows if r[1] == "demo-3"])
            show("all, first minute", [r for r in rows if r[0] > began])
            if os.environ.get("RESTART"):
                rows.clear(); began = time.monotonic()
                until[0] = began + 90
                going = asyncio.create_task(load(client, until))
                subprocess.run([*run, "restart", "demo", "--fleet", f"http://127.0.0.1:{PORT}"], env=env, cwd="/tmp")
                print(f"restarted in {time.monotonic()-began:.0f} s")
                until[0] = time.monotonic() + 5
                await going
                show("restart", rows)
    finally:
        fleet.terminate(); fleet.wait(60)

asyncio.run(main())
