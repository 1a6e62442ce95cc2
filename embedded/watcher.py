"""Cleans up after an ephemeral cluster whose owner was killed. Owns one small shell process.

The shell reads from a pipe. However this process ends, the pipe closes. The shell then stops the server and removes the
folder. Where /proc exists, the shell signals only a process that has the folder in its command line, because another
process may have got the server's process id.
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
# Repeat: a process whose id the shell does not know may still be writing.
tries=0
while [ -e "$folder" ] && [ "$tries" -lt 50 ]; do
    rm -rf -- "$folder" || sleep 0.1
    tries=$((tries + 1))
done
"""
_END_S_MAX = 10.0


class Watcher:
    def __init__(self, folder: Path) -> None:
        # Run the shell as this user, because the server's account may have no right to remove the folder.
        self._shell = spawn(["/bin/sh", "-c", _SCRIPT, "windrow-watcher", folder], account=None, stdin=subprocess.PIPE)

    def guard(self, pid: int | None) -> None:
        """Sets which process the watcher will stop, instead of the previous one. None: no process."""
        self._say(f"{pid or 0}\n")

    def dismiss(self) -> None:
        """Ends the watcher without stopping the server or removing the folder."""
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
        # If the watcher has ended, only the clean-up after a kill of this process is lost.
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(words.encode())
            self._shell.stdin.flush()
