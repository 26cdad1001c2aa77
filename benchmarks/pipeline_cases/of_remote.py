"""Cases of remote files: folders on a web server that takes its time to answer."""

import asyncio
import functools
import itertools
import multiprocessing

import fsspec
import numpy as np

from pipeline_cases import HAND, TFOPT, Case, Way, at_least, no_way
from tfopt.pipelines import fetch

_LATENCY = 0.03  # seconds, of each request


def serve(folder, port):
    """Serves a folder, in a process of its own, and sends its port."""
    from aiohttp import web

    async def respond(request):
        await asyncio.sleep(_LATENCY)
        path = folder / request.path.lstrip("/")
        if path.is_file():
            return web.FileResponse(path)
        links = "".join(f'<a href="{entry.name}">{entry.name}</a>' for entry in path.iterdir())
        return web.Response(text=links, content_type="text/html")

    async def main():
        app = web.Application()
        app.router.add_get("/{path:.*}", respond)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def files(folder, scale, share, kib):
    """So many files for each photograph, of so many KiB."""
    count = max(1, round(share * scale.photos))
    remote = folder / "remote" / "files"
    remote.mkdir(parents=True)
    content = np.random.default_rng(0).bytes(1024 * kib)
    for number in range(count):
        (remote / f"{number:05}.bin").write_bytes(content)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("spawn").Process(target=serve, args=(folder / "remote", sender), daemon=True).start()
    url = f"http://127.0.0.1:{receiver.recv()}/files/"
    numbers = itertools.count()

    def into(copy):
        """Copies into a new folder, which stays: to remove it would be timed too."""
        target = folder / f"copy-{next(numbers)}"
        copy(target)
        sizes = [path.stat().st_size for path in target.rglob("*.bin")]
        if sizes != [len(content)] * count:
            raise AssertionError(f"expected {count:,} files of {len(content):,} bytes. Found: {sizes}")

    def by_hand(target):
        target.mkdir()
        server = fsspec.filesystem("http")
        server.get(server.find(url), f"{target}/")

    return Case(
        question=f"{count:,} files of {kib:,} KiB from a web server {1000 * _LATENCY:.0f} ms away, to a local disk",
        timed="copy",
        goal=at_least(0.9),
        ways=[
            Way(TFOPT, "fetch(url, folder)", lambda: into(lambda target: fetch(url, target))),
            Way(HAND, "fsspec: get(find(url), folder)", lambda: into(by_hand)),
            no_way("Grain", "it copies no files"),
        ],
        examples=count,
        batch=1,
    )


CASES = {
    name: functools.partial(files, share=share, kib=kib)
    for name, share, kib in [
        ("remote files", 1, 100),
        ("remote files, small", 4, 10),
        ("remote files, large", 1 / 128, 102_400),
    ]
}
