//! `valkey-rdma-sync`: replicas built by one-sided RDMA READ.

mod report;

use std::io::{self, IsTerminal, Read, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rdma_snapshot::run::{Publish, Pull, Republish, Stop, publish, pull};
use rdma_snapshot::valkey::{LiveSink, LiveSource, Opening, Server, Target};
use rdma_snapshot::wire::{Content, Layout};
use rdma_snapshot::{Error, FileSink, FileSource, Secret, publisher, reader};
use rdma_verbs::Verbs;
use rustix::process::{getpriority_process, setpriority_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use report::Report;

const EXAMPLES: &str = "\
Examples:
  valkey-rdma-sync publish --bind 192.0.2.1:7400 --from valkey://127.0.0.1
  valkey-rdma-sync pull 192.0.2.1:7400 --into valkey://127.0.0.1:6380
  valkey-rdma-sync pull 192.0.2.1:7400 --rdb dump.rdb
  valkey-rdma-sync publish --bind 192.0.2.1:7400 \\
      --from valkey://USER:PASSWORD@127.0.0.1:6379 --follow";

#[derive(Parser)]
#[command(name = "valkey-rdma-sync", version, about = "Builds replicas of a Valkey by one-sided RDMA READ", after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Publishes a snapshot for others to pull.
    Publish(PublishArguments),
    /// Pulls a snapshot that somebody publishes.
    Pull(PullArguments),
}

/// Arguments of both sides.
#[derive(Args)]
struct Common {
    /// A file with the secret that both sides must have. Without it anybody may pull.
    #[arg(long)]
    secret_file: Option<PathBuf>,
    /// READs under way at a time, at most.
    #[arg(long, default_value_t = 16)]
    depth: u8,
    /// How far it is, and what came of it, as lines of JSON on standard output.
    #[arg(long)]
    json: bool,
    /// How much the processor prefers other programs, as `nice` does it.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(i32).range(0..=19))]
    nice: i32,
}

#[derive(Args)]
#[group(id = "source", required = true, multiple = false, args = ["file", "rdb", "from"])]
struct PublishArguments {
    /// The address of an RDMA device, and a port.
    #[arg(long)]
    bind: SocketAddr,
    /// Publishes any file.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Publishes an RDB file, which can be pulled into a Valkey.
    #[arg(long)]
    rdb: Option<PathBuf>,
    /// Publishes what a live Valkey has: valkey://USER:PASSWORD@HOST:PORT, of which HOST is enough.
    #[arg(long)]
    from: Option<String>,
    /// Publishes the writes after the snapshot too, until SIGINT; then readers end where the Valkey
    /// is at that moment.
    #[arg(long, requires = "from")]
    follow: bool,
    /// Bytes of later writes, at least, after which another snapshot is made for readers that come
    /// then. It is made once they are also as many as the snapshot has.
    #[arg(long, requires = "follow", default_value_t = 64 << 20)]
    backlog: u64,
    /// Bytes of a snapshot that are taken from the Valkey in a second, at most.
    #[arg(long, requires = "from", value_parser = clap::value_parser!(u64).range(1..))]
    rate: Option<u64>,
    /// Leaves the Valkey's rdbcompression as it is. Without this it is off while the Valkey forks,
    /// and then as it was.
    #[arg(long, requires = "from")]
    keep_compression: bool,
    /// How the table is laid out.
    #[arg(long, value_enum, default_value = "chunks")]
    layout: LayoutName,
    /// Bytes in a chunk.
    #[arg(long, default_value_t = 1 << 20, value_parser = clap::value_parser!(u32).range(4096..=64 << 20))]
    chunk_size: u32,
    /// Bytes of memory for the snapshot and the writes after it, at most. While another snapshot is
    /// made, it holds both. By default three quarters of what the machine and the limits of control
    /// groups leave at the start.
    #[arg(long)]
    memory: Option<u64>,
    /// The snapshot may be larger than --memory, which is a window over it: chunks that all readers
    /// have are released, and the Valkey waits meanwhile. All of --readers must be there for that,
    /// so one that is lost is awaited. One that comes later is refused, and there is no newer
    /// snapshot.
    #[arg(long, requires = "readers")]
    window: bool,
    /// Ends when so many readers have had everything. Without this and --keep: at SIGINT.
    #[arg(long)]
    readers: Option<usize>,
    /// Ends so many seconds after everything is published, whoever still reads.
    #[arg(long)]
    keep: Option<u64>,
    /// Readers at the same time.
    #[arg(long, default_value_t = 64)]
    max_readers: usize,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
#[group(id = "sink", required = true, multiple = false, args = ["file", "rdb", "into"])]
struct PullArguments {
    /// Publishers of the snapshot, host:port; after a cut it goes on with the next.
    #[arg(required = true)]
    publishers: Vec<String>,
    /// Pulls into a file.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Pulls into a file, an RDB for a Valkey to start with.
    #[arg(long)]
    rdb: Option<PathBuf>,
    /// Pulls into a live Valkey: valkey://USER:PASSWORD@HOST:PORT, of which HOST is enough.
    #[arg(long)]
    into: Option<String>,
    /// Replaces what is there.
    #[arg(long)]
    replace: bool,
    /// Asserts that the target has loaded every module whose data types the RDB contains. A target
    /// without one of them exits while it loads the RDB.
    #[arg(long, requires = "into")]
    modules: bool,
    /// The address of this machine that the Valkey connects to.
    #[arg(long, requires = "into")]
    serve_on: Option<IpAddr>,
    /// Attempts without progress, after which it gives up.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    attempts: u32,
    /// Hands on what was pulled: the address of the same RDMA device, and a port.
    #[arg(long)]
    republish: Option<SocketAddr>,
    /// Ends when so many readers have had everything from here.
    #[arg(long, default_value_t = 1, requires = "republish")]
    republish_readers: usize,
    /// Or so many seconds after everything was pulled.
    #[arg(long, default_value_t = 60, requires = "republish")]
    republish_keep: u64,
    /// Bytes of memory for what is handed on, at most. Once there are more, handing on ends, and
    /// the pull goes on. By default three quarters of what the machine and the limits of control
    /// groups leave at the start.
    #[arg(long, requires = "republish")]
    memory: Option<u64>,
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, ValueEnum)]
enum LayoutName {
    /// Chunks with digests, which can be read while the next are made, and handed on.
    Chunks,
    /// The table of the paper: addresses in front, areas of 4 MiB behind. Files only, one digest
    /// for all of it.
    Rcp,
}

fn main() -> ExitCode {
    rdma_program::run(perform)
}

fn perform(Cli { command }: Cli) -> ExitCode {
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into()).from_env_lossy();
    let is_terminal = io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(is_terminal).with_writer(|| Folded).init();
    let outcome = match command {
        Command::Publish(arguments) => run_publish(&arguments),
        Command::Pull(arguments) => run_pull(arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error.to_string());
            ExitCode::from(status(&*error))
        }
    }
}

/// Columns of output for people.
const COLUMNS: usize = 120;

fn say(what: &str) {
    let _not_read = Folded.write_all(format!("valkey-rdma-sync: {what}\n").as_bytes());
}

/// Standard error, with lines of at most [`COLUMNS`].
struct Folded;

impl Folded {
    fn fold(text: &str) -> String {
        // A word longer than a line is an address or a path, which people copy.
        let options = textwrap::Options::new(COLUMNS)
            .subsequent_indent("  ")
            .break_words(false)
            .word_splitter(textwrap::WordSplitter::NoHyphenation);
        textwrap::fill(text, options)
    }
}

impl Write for Folded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(Self::fold(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the secret: a file's bytes without surrounding white space.
fn secret(common: &Common) -> io::Result<Secret> {
    let Some(path) = &common.secret_file else { return Ok(Secret::default()) };
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(64 << 10).read_to_end(&mut bytes));
    read.map_err(|error| {
        io::Error::new(error.kind(), format!("the secret file {}: {error}", path.display()))
    })?;
    let bytes = bytes.trim_ascii();
    if bytes.is_empty() {
        return Err(io::Error::other(format!("{} has no secret in it", path.display())));
    }
    Ok(Secret::new(bytes))
}

/// The first SIGINT ends the log, if there is one. The next signal ends the run and undoes its
/// changes. One more leaves the changes as they are, and the last ends the process at once.
///
/// Called once there is something to undo. Before that, a signal ends the process by default.
fn on_signals(mut log: Option<Stop>, run: Stop) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            // Whatever ends it, the log must end, too.
            let ended = log.take().inspect(Stop::stop);
            match ended.filter(|_| signal == SIGINT) {
                Some(_) => {}
                None if run.is_forced() => std::process::exit(1),
                None => {
                    run.stop();
                    if !run.is_forced() {
                        say("stopping, and undoing what was begun; another signal leaves it as it is");
                    }
                }
            }
        }
    });
    Ok(())
}

fn verbs() -> io::Result<Verbs> {
    Verbs::load().map_err(|error| io::Error::new(io::ErrorKind::Unsupported, error))
}

fn status(error: &(dyn std::error::Error + 'static)) -> u8 {
    // It has the kind of the backend's error, and nothing that `rdma_program::status` finds.
    match error.downcast_ref() {
        Some(Error::Control(control)) => rdma_program::status(&io::Error::from(control.clone())),
        _ => rdma_program::status(error),
    }
}

/// Returns the folder of notes about settings to restore at a Valkey.
fn notes() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    state.unwrap_or_else(std::env::temp_dir).join("valkey-rdma-sync")
}

enum From {
    File(FileSource),
    Live(Box<LiveSource>),
}

/// Lowers the priority of this thread, and of those that it starts.
fn be_nice(common: &Common) -> io::Result<()> {
    if common.nice > 0 {
        setpriority_process(None, getpriority_process(None)?.saturating_add(common.nice))?;
    }
    Ok(())
}

/// Returns the most bytes of memory for a table: what was asked for, or the default. Registered
/// memory cannot be swapped out, so a part is left to other programs.
fn most(memory: Option<u64>) -> u64 {
    let by_default = || Some(rdma_program::memory()?.available / 4 * 3);
    memory.or_else(by_default).unwrap_or(publisher::Config::default().memory)
}

fn run_publish(arguments: &PublishArguments) -> Result<(), Box<dyn std::error::Error>> {
    be_nice(&arguments.common)?;
    let layout = match arguments.layout {
        LayoutName::Chunks => Layout::Chunks,
        LayoutName::Rcp => Layout::Rcp,
    };
    let (stop, withdraw) = (Stop::default(), Stop::default());
    let how = Publish {
        config: publisher::Config {
            secret: secret(&arguments.common)?,
            readers: arguments.max_readers,
            depth: arguments.common.depth,
            memory: most(arguments.memory),
            ..publisher::Config::default()
        },
        layout,
        chunk_size: arguments.chunk_size,
        backlog: arguments.backlog,
        rate: arguments.rate,
        readers: arguments.readers,
        window: arguments.readers.filter(|_| arguments.window),
        keep: arguments.keep.map(Duration::from_secs),
        stop: stop.clone(),
        withdraw: withdraw.clone(),
    };
    let backend = verbs()?;
    on_signals(arguments.follow.then(|| stop.clone()), withdraw.clone())?;
    let source = match (&arguments.file, &arguments.rdb, &arguments.from) {
        (Some(path), ..) => From::File(FileSource::open(path, Content::Bytes)?),
        (_, Some(path), _) => From::File(FileSource::open(path, Content::Rdb)?),
        (.., Some(url)) => {
            let server = Server::new(url)?;
            say(&format!("waiting for the snapshot that {server} makes"));
            let opening = Opening {
                follow: arguments.follow,
                uncompressed: !arguments.keep_compression,
                notes: Some(notes()),
                // The first signal ends this wait, too.
                stop: if arguments.follow { stop } else { withdraw.clone() },
            };
            From::Live(Box::new(LiveSource::open(server, &opening)?))
        }
        _ => return Err("nothing to publish".into()),
    };
    let mut report = Report::new("published", arguments.common.json, withdraw);
    let bound = |address: SocketAddr| say(&format!("publishing on {address}"));
    let told = &mut |progress: &_| report.tell(progress);
    let published = match source {
        From::File(source) => publish(&backend, arguments.bind, source, &how, bound, told),
        From::Live(source) => publish(&backend, arguments.bind, *source, &how, bound, told),
    };
    report.end(published)
}

fn run_pull(arguments: PullArguments) -> Result<(), Box<dyn std::error::Error>> {
    be_nice(&arguments.common)?;
    let secret = secret(&arguments.common)?;
    let depth = arguments.common.depth;
    let stop = Stop::default();
    let republish = arguments.republish.map(|address| Republish {
        address,
        config: publisher::Config {
            secret: secret.clone(),
            depth,
            memory: most(arguments.memory),
            ..publisher::Config::default()
        },
        readers: arguments.republish_readers,
        keep: Duration::from_secs(arguments.republish_keep),
    });
    let how = Pull {
        config: reader::Config { secret, depth, ..reader::Config::default() },
        attempts: arguments.attempts,
        republish,
        stop: stop.clone(),
        ..Pull::default()
    };
    let mut publishers = Vec::new();
    for publisher in &arguments.publishers {
        publishers.extend(publisher.to_socket_addrs().map_err(|error| format!("{publisher}: {error}"))?);
    }
    let into = arguments.into.map(|url| Server::new(&url)).transpose()?;
    let backend = verbs()?;
    on_signals(None, stop.clone())?;
    let mut report = Report::new("pulled", arguments.common.json, stop);
    let told = &mut |progress: &_| report.tell(progress);
    let (file, rdb) = (arguments.file.zip(Some(Content::Bytes)), arguments.rdb.zip(Some(Content::Rdb)));
    let pulled: Result<_, Error> = match (file.or(rdb), into) {
        (Some((path, content)), _) => {
            pull(&backend, &publishers, FileSink::new(path, content, arguments.replace), &how, told)
        }
        (None, Some(server)) => {
            let target = Target {
                server,
                replace: arguments.replace,
                modules: arguments.modules,
                serve_on: arguments.serve_on,
                notes: notes(),
            };
            pull(&backend, &publishers, LiveSink::new(target), &how, told)
        }
        _ => return Err("nowhere to pull to".into()),
    };
    report.end(pulled)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raise_until(is_so: impl Fn() -> bool) {
        signal_hook::low_level::raise(SIGINT).expect("a signal to this process");
        while !is_so() {
            std::thread::yield_now();
        }
    }

    /// The writer of the log gets the first SIGINT, the second ends the run, and the third ends its
    /// undoing.
    #[test]
    fn signals_end_the_log_then_the_run_then_its_undoing() {
        let (log, run) = (Stop::default(), Stop::default());
        on_signals(Some(log.clone()), run.clone()).expect("signals");
        raise_until(|| log.is_stopped());
        assert!(!run.is_stopped());
        raise_until(|| run.is_stopped());
        assert!(!run.is_forced());
        raise_until(|| run.is_forced());
    }

    /// The error names a missing file.
    #[test]
    fn a_missing_secret_file_is_named() {
        let common =
            Common { secret_file: Some("/nonexistent/secret".into()), depth: 1, json: false, nice: 0 };
        let told = secret(&common).map(drop).expect_err("no file").to_string();
        assert!(told.starts_with("the secret file /nonexistent/secret: "), "{told}");
        let source = FileSource::open("/nonexistent/rdb".as_ref(), Content::Rdb).expect_err("no file");
        assert!(source.to_string().starts_with("/nonexistent/rdb: "), "{source}");
    }

    /// Output for people is at most [`COLUMNS`] wide, and loses nothing but a space.
    #[test]
    fn lines_for_people_are_folded() {
        let left = "the target is still a replica of 192.0.2.1:40000, where no server is: ".repeat(7);
        let folded = Folded::fold(&left);
        assert!(folded.lines().count() > 3 && folded.lines().all(|line| line.len() <= COLUMNS), "{folded}");
        assert!(folded.split_whitespace().eq(left.split_whitespace()));
        assert_eq!(Folded::fold("short\n"), "short\n");
    }
}
