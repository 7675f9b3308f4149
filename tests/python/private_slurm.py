"""A real Slurm on this machine alone, running only while a test needs it.

It needs Debian's packages slurm-wlm and munge, but none of their services. munged, slurmctld and
slurmd are started here, talk over the loopback and are stopped again.
"""

import contextlib
import os
import pathlib
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

START_SECONDS = 60
STOP_SECONDS = 15
CANCEL_SECONDS = 5
COMMAND_SECONDS = 60
POLL_SECONDS = 0.1
TAIL_LINES = 30
# Variables that Slurm's commands read. They belong to another Slurm if a job runs the tests.
PREFIXES = ("SLURM", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")
CONFIGURATION = """\
ClusterName=private
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={munge}
{listening}
StateSaveLocation={home}/state
SlurmdSpoolDir={spool}
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
MinJobAge=86400
KillWait=10
NodeName={node} NodeAddr=127.0.0.1 CPUs=2 RealMemory={megabytes} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def find(program: str) -> str | None:
    """The path of a program, including those in sbin."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def installed() -> bool:
    """Whether this machine has the programs that a private Slurm needs."""
    return all(find(program) for program in ("slurmctld", "slurmd", "sbatch", "munged"))


@contextlib.contextmanager
def private_slurm(folder: str | os.PathLike[str]) -> Iterator[dict[str, str]]:
    """Runs a Slurm with one node, this machine with two CPUs. Its files are in the folder.

    Yields the environment in which sbatch, squeue, sinfo and scontrol talk to it. At the end all
    jobs are cancelled and no process of Slurm or of a job is left.
    """
    home = pathlib.Path(tempfile.mkdtemp(prefix="slurm_", dir=folder)).resolve()
    environment = environment_for(home)
    with contextlib.ExitStack() as stack:
        short = stack.enter_context(short_folder())
        configure(home, short)
        stack.callback(kill_leftovers, home)
        munged = stack.enter_context(daemon("munged", home, environment, *munge_options(short)))
        wait_for_daemons(home, [munged], (short / "munge.socket").is_socket)
        options = ("-D", "-f", environment["SLURM_CONF"])
        slurmctld = stack.enter_context(daemon("slurmctld", home, environment, *options))
        slurmd = stack.enter_context(daemon("slurmd", home, environment, *options))
        wait_for_daemons(home, [munged, slurmctld, slurmd], lambda: node_is_idle(environment))
        stack.callback(cancel_jobs, environment)
        yield environment


def wait_for_job(
    job: int | str, environment: dict[str, str], deadline_seconds: float
) -> dict[int, tuple[str, int]]:
    """Waits until all tasks of an array job have left the queue. Returns the state and exit code of each.

    States are Slurm's (COMPLETED, FAILED, CANCELLED, TIMEOUT, ...). Exit codes are as in subprocess:
    negative for a task ended by a signal. A job without an array is task 0.
    """
    deadline = time.monotonic() + deadline_seconds
    while queue := command(environment, "squeue", "--noheader", "--array", f"--jobs={job}"):
        if time.monotonic() > deadline:
            logs = log_tails(pathlib.Path(environment["SLURM_CONF"]).parent)
            raise TimeoutError(f"job {job} after {deadline_seconds} s:\n{queue}\n{logs}")
        time.sleep(POLL_SECONDS)
    return finished_tasks(job, environment)


def finished_tasks(job: int | str, environment: dict[str, str]) -> dict[int, tuple[str, int]]:
    """State and exit code of each task of a job. slurmctld remembers them for MinJobAge seconds."""
    columns = "--Format=ArrayTaskID:.30,State:.30,exit_code:.30"
    options = ("--noheader", "--array", "--states=all", f"--jobs={job}", columns)
    rows = [line.split() for line in command(environment, "squeue", *options).splitlines()]
    tasks = {
        int(task) if task.isdigit() else 0: (state, os.waitstatus_to_exitcode(int(status)))
        for task, state, status in rows
    }
    return dict(sorted(tasks.items()))


def command(environment: dict[str, str], *words: str) -> str:
    """The output of a Slurm command. Raises RuntimeError with its stderr if it fails."""
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr}")
    return done.stdout


def environment_for(home: pathlib.Path) -> dict[str, str]:
    """The current environment, with this Slurm's settings instead of another's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    return {**kept, "SLURM_CONF": str(home / "slurm.conf")}


@contextlib.contextmanager
def short_folder() -> Iterator[pathlib.Path]:
    """A folder with a short path for munged and for sockets. Everybody may enter it, only we may write.

    munged rejects a folder like pytest's, which others may not enter, and the path of a socket may
    have at most 107 characters.
    """
    with tempfile.TemporaryDirectory(prefix="slurm_", dir="/tmp") as name:
        folder = pathlib.Path(name)
        folder.chmod(0o711)
        yield folder


def munge_options(short: pathlib.Path) -> list[str]:
    """Options of a munged with a new key and all its files in the short folder."""
    key = short / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = {"key-file": key, "socket": short / "munge.socket"}
    files |= {f"{kind}-file": short / f"munge.{kind}" for kind in ("pid", "log", "seed")}
    paths = [f"--{option}={path}" for option, path in files.items()]
    return ["--foreground", "--origin=127.0.0.1", "--num-threads=10", *paths]


def configure(home: pathlib.Path, short: pathlib.Path) -> None:
    """Writes the configuration files and creates the folders that they name."""
    for name in ("state", "spool", "cgroup"):
        (home / name).mkdir(mode=0o700)
    (short / "spool").symlink_to(home / "spool")
    controller_port, node_port = free_ports(2)
    text = CONFIGURATION.format(
        node=socket.gethostname().split(".")[0],
        listening=listening(),
        controller_port=controller_port,
        node_port=node_port,
        user=pwd.getpwuid(os.geteuid()).pw_name,
        munge=short / "munge.socket",
        home=home,
        spool=short / "spool",
        megabytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
    )
    (home / "slurm.conf").write_text(text)
    (home / "cgroup.conf").write_text(no_cgroups(home / "cgroup"))


def no_cgroups(empty: pathlib.Path) -> str:
    """A cgroup.conf that makes slurmd ignore the machine's cgroups.

    Before version 24.05 slurmd always loads a cgroup plugin and detects the machine's version unless
    told which. The plugin for version 1 does nothing until another plugin asks it to.
    """
    version = command(dict(os.environ), str(find("slurmd")), "-V")
    year, month = map(int, re.findall(r"\d+", version)[:2])
    if (year, month) >= (24, 5):
        return "CgroupPlugin=disabled\n"
    return f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={empty}\n"


def listening() -> str:
    """The setting that makes the daemons listen on the loopback only, where Slurm can do that.

    Slurm can listen on the address of the machine's name or on all addresses. In the latter case
    munged's new key keeps strangers out.
    """
    with contextlib.suppress(OSError):
        if socket.gethostbyname(socket.gethostname()) == "127.0.0.1":
            return "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny"
    return ""


def free_ports(count: int) -> list[int]:
    """Different ports that are currently free."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in listeners]


@contextlib.contextmanager
def daemon(
    name: str, home: pathlib.Path, environment: dict[str, str], *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a daemon in the foreground of its own session, which Ctrl-C does not reach."""
    with open(home / f"{name}.out", "wb") as out:
        process = subprocess.Popen(
            [str(find(name)), *options],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, by force if it does not react."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for_daemons(
    home: pathlib.Path, daemons: list[subprocess.Popen[bytes]], ready: Callable[[], bool]
) -> None:
    """Waits until the daemons are ready. Raises RuntimeError with the ends of their logs otherwise."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        ended = [process.args[0] for process in daemons if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            what = f"{', '.join(ended)} ended" if ended else f"not ready after {START_SECONDS} s"
            raise RuntimeError(f"the private Slurm did not start: {what}\n{log_tails(home)}")
        time.sleep(POLL_SECONDS)


def node_is_idle(environment: dict[str, str]) -> bool:
    """Whether slurmctld answers and sees slurmd."""
    options = ("--noheader", "--format=%T")
    with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
        return command(environment, "sinfo", *options).strip() == "idle"
    return False


def log_tails(home: pathlib.Path) -> str:
    """The ends of the logs of the daemons and of job steps."""
    files = [home / f"{name}.out" for name in ("munged", "slurmctld", "slurmd")]
    return "\n".join(
        "\n".join([f"--- {file}", *file.read_text(errors="replace").splitlines()[-TAIL_LINES:]])
        for file in [*files, home / "slurmd.log"]
        if file.exists()
    )


def cancel_jobs(environment: dict[str, str]) -> None:
    """Cancels all jobs and gives them a little time to end."""
    deadline = time.monotonic() + CANCEL_SECONDS
    with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
        jobs = command(environment, "squeue", "--noheader", "--format=%A").split()
        if jobs:
            command(environment, "scancel", "--quiet", *jobs)
        while time.monotonic() < deadline and command(environment, "squeue", "--noheader"):
            time.sleep(POLL_SECONDS)


def kill_leftovers(home: pathlib.Path) -> None:
    """Kills what outlived the daemons: job steps and background processes of jobs."""
    deadline = time.monotonic() + STOP_SECONDS
    while (left := leftovers(home)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def leftovers(home: pathlib.Path) -> list[int]:
    """Processes that belong to the Slurm with this home."""
    processes = [path for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]
    return [int(path.name) for path in processes if of_job(path, home) or of_slurm(path, home)]


def of_job(process: pathlib.Path, home: pathlib.Path) -> bool:
    """Whether a process has the environment of a job of the Slurm with this home."""
    with contextlib.suppress(OSError):
        variables = (process / "environ").read_bytes().split(b"\0")
        ours = os.fsencode(f"SLURM_CONF={home / 'slurm.conf'}") in variables
        return ours and any(variable.startswith(b"SLURMD_NODENAME=") for variable in variables)
    return False


def of_slurm(process: pathlib.Path, home: pathlib.Path) -> bool:
    """Whether a process is a Slurm program that has a file in this home open."""
    if not target(process / "exe").name.startswith("slurm"):
        return False
    with contextlib.suppress(OSError):
        return any(target(file).parent == home for file in (process / "fd").iterdir())
    return False


def target(link: pathlib.Path) -> pathlib.Path:
    """The target of a link; empty if the link is gone or cannot be read."""
    with contextlib.suppress(OSError):
        return link.readlink()
    return pathlib.Path()
