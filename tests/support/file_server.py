"""A web server of a folder, which can fail in the middle: aiohttp's, in a thread."""

import asyncio
import html
import threading
from contextlib import contextmanager
from urllib.parse import quote

from aiohttp import web


class FileServer:
    """Serves a folder. `faults` decides what goes wrong: called with each GET of a file, it names a fault or None.

    `refuses` is called with every request, also those for folders and for the size of files, and returns a status or 0.
    """

    def __init__(self, folder):
        self.folder, self.url = folder, ""
        self.faults, self.refuses = lambda request: None, lambda request: 0
        self.requests = []  # method, path and range of each

    async def respond(self, request):
        path = self.folder / request.path.lstrip("/")
        self.requests.append((request.method, request.path, request.headers.get("Range")))
        if status := self.refuses(request):
            return web.Response(status=status)
        if path.is_dir():
            names = [f"{entry.name}{'/' * entry.is_dir()}" for entry in path.iterdir()]
            others = ["?C=N;O=D", "/", "../", "./", "mailto:me@example.org"]  # as servers have them
            links = "".join(f'<a href="{html.escape(link)}">link</a>' for link in [*others, *map(quote, names)])
            return web.Response(text=links, content_type="text/html")
        if not path.is_file():
            raise web.HTTPNotFound
        fault = self.faults(request) if request.method == "GET" else None
        if isinstance(fault, int):
            return web.Response(status=fault)
        if fault == "stalls":
            await asyncio.sleep(2)  # longer than the tests wait
        if fault in ("truncates", "shortens"):
            return await self._part(request, path, fault)
        if fault == "ignores ranges":
            return web.Response(body=path.read_bytes())
        return web.FileResponse(path)

    async def _part(self, request, path, fault):
        """Sends half of what was asked for, and either closes the connection or says that it was all."""
        content = path.read_bytes()[request.http_range]
        half = content[: len(content) // 2]
        headers = {"Content-Length": str(len(content if fault == "truncates" else half))}
        response = web.StreamResponse(status=206, headers=headers)
        await response.prepare(request)
        await response.write(half)
        request.transport.close()
        return response


@contextmanager
def serving(folder):
    """Yields a `FileServer` of the folder; its `url` ends with a slash."""
    server, loop, runners = FileServer(folder), asyncio.new_event_loop(), []
    started = threading.Event()

    async def start():
        app = web.Application()
        app.router.add_get("/{path:.*}", server.respond)
        runner = web.AppRunner(app, shutdown_timeout=0, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        started.set()

    loop.create_task(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
