"""What cleans up after an ephemeral cluster whose owner was killed. Owns one small shell process.

The shell holds the reading end of a pipe from us. When we die, however we die, the pipe ends; the shell then
stops the server and removes the folder. It acts on nothing else, and refuses to signal a process that
does not name the folder: the id that it was told may have been reused.
"""

import contextlib
import subprocess
from pathlib import Path

from embedded.account import spawn

_SCRIPT = """
folder=$1
pid=0
while read -r word; do
    [ "$word" = done ] && exit 0
    pid=$word
done
ours() {
    [ "$pid" -gt 0 ] && kill -0 "$pid" || return 1
    [ ! -d /proc/self ] || grep -qF -- "$folder" "/proc/$pid/cmdline"
}
ours && kill -QUIT "$pid"
tries=0
while ours && [ "$tries" -lt 100 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
ours && kill -KILL "$pid"
# Again and again: a process that was not told of may still be writing.
tries=0
while [ -e "$folder" ] && [ "$tries" -lt 50 ]; do
    rm -rf -- "$folder" || sleep 0.1
    tries=$((tries + 1))
done
"""
_END_S_MAX = 10.0


class Watcher:
    def __init__(self, folder: Path) -> None:
        # As ourselves, not as the server's account: only we may remove the folder that we made.
        self._shell = spawn(["/bin/sh", "-c", _SCRIPT, "windrow-watcher", folder], account=None, stdin=subprocess.PIPE)

    def guard(self, pid: int | None) -> None:
        """Tell which process to stop: the newest one counts, None takes it back."""
        self._say(f"{pid or 0}\n")

    def dismiss(self) -> None:
        """End the watcher; the folder and the server are the caller's again."""
        self._say("done\n")
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()
        try:
            self._shell.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait(_END_S_MAX)

    def _say(self, words: str) -> None:
        assert self._shell.stdin is not None
        # Without the watcher only the protection against our own violent death is lost.
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(words.encode())
            self._shell.stdin.flush()
