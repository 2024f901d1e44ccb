//! The command line: runs the cases for publishers or readers against the given target.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use rdma_snapshot::wire::Layout;
use rdma_softsim::Fabric;
use rdma_verbs::Verbs;
use suite::terminal::{self, cannot_run};

use super::builtin::{OwnPublisher, OwnReaders, SECRET};
use super::publisher::{self, Publisher};
use super::reader::{self, Reader, Readers};
use conformance::blackbox::command::{finish, resolve};
use conformance::blackbox::process::{ExecClients, ExecServer};
use conformance::blackbox::target::{Running, TargetClients as _, TargetServer as _};
use conformance::device;
use conformance::exit::{BROKEN, USAGE};

/// Whom to test.
#[derive(Subcommand)]
pub enum Command {
    /// A publisher. Without a target: this workspace's own, in both layouts, on the fabric inside
    /// this process.
    Publisher(PublisherRun),
    /// Readers, one for each case. Without a command: this workspace's own, on the fabric inside
    /// this process.
    Reader(ReaderRun),
}

/// Options of both.
#[derive(Args)]
struct Common {
    /// Only cases whose id contains this.
    #[arg(long, default_value = "")]
    select: String,
    /// Seconds that the target may take for anything that must happen. Its own limits must be below
    /// eight times that.
    #[arg(long, default_value_t = 5)]
    patience: u64,
    /// A file with the secret of both sides; none if it has none. A target in this process has its
    /// own.
    #[arg(long)]
    secret_file: Option<PathBuf>,
    /// An address of this machine's RDMA device (ADDRESS:PORT): where a publisher that is started
    /// here shall listen, or where the suite publishes for readers.
    #[arg(long)]
    listen: Option<SocketAddr>,
}

/// Options for publishers.
#[derive(Args)]
pub struct PublisherRun {
    /// It listens there already (HOST:PORT). What it publishes must have an end.
    #[arg(long, conflicts_with_all = ["exec", "listen"])]
    target: Option<String>,
    /// Shell command that starts it, with {host} and {port} for where it shall listen.
    #[arg(long, requires = "listen")]
    exec: Option<String>,
    #[command(flatten)]
    common: Common,
}

/// Options for readers.
#[derive(Args)]
pub struct ReaderRun {
    /// Shell command that has it pull from {host} and {port} into the file {file}, and end; started
    /// for each case.
    #[arg(long, requires = "listen")]
    exec: Option<String>,
    #[command(flatten)]
    common: Common,
}

/// Runs the cases, and reports. Returns the exit code of the program.
#[must_use]
pub fn run(command: &Command) -> ExitCode {
    // Removed with the process's other files: a failed case may leave some.
    let folder = std::env::temp_dir().join(format!("valkey-rdma-snapshot-suite-{}", std::process::id()));
    if let Err(error) = std::fs::create_dir_all(&folder) {
        return broken(&format!("{}: {error}", folder.display()));
    }
    let code = match command {
        Command::Publisher(options) => test_publisher(options, &folder),
        Command::Reader(options) => test_readers(options, &folder),
    };
    let _left = std::fs::remove_dir_all(&folder);
    code
}

fn broken(reason: &str) -> ExitCode {
    terminal::complain(reason, 4);
    ExitCode::from(BROKEN)
}

fn secret(common: &Common) -> Result<Vec<u8>, String> {
    let Some(file) = &common.secret_file else { return Ok(Vec::new()) };
    let bytes = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(bytes.trim_ascii().to_vec())
}

fn test_publisher(options: &PublisherRun, folder: &Path) -> ExitCode {
    let common = &options.common;
    let patience = Duration::from_secs(common.patience);
    let test = |target: &str, publisher: &Publisher<Verbs>| {
        terminal::run(target, &publisher::cases(), publisher, &common.select)
    };
    if options.target.is_none() && common.listen.is_none() {
        for (title, layout) in [("own publisher", Layout::Chunks), ("own publisher, layout rcp", Layout::Rcp)]
        {
            let fabric = Fabric::new();
            let address = SocketAddr::from(([192, 0, 2, 1], 7400));
            let own = OwnPublisher::start(&fabric.host(&[address.ip()]), address, layout, folder);
            let Ok(_own) = own.map_err(|reason| terminal::complain(&reason.to_string(), 4)) else {
                return ExitCode::from(BROKEN);
            };
            let backend = fabric.host(&[[192, 0, 2, 66].into()]);
            let publisher = Publisher { backend, address, secret: SECRET.to_vec(), patience };
            let code = terminal::run(title, &publisher::cases(), &publisher, &common.select);
            if code != ExitCode::SUCCESS {
                return code;
            }
        }
        return ExitCode::SUCCESS;
    }
    let running =
        match options.target.as_deref().map(|target| resolve(target).map(|at| (target, at))).transpose() {
            Ok(running) => running,
            Err(reason) => return finish(Err(reason)),
        };
    let (backend, secret) = match (device(), secret(common)) {
        (Ok(backend), Ok(secret)) => (backend, secret),
        (Err(reason), _) => return cannot_run(&reason),
        (_, Err(reason)) => return broken(&reason),
    };
    match (running, &options.exec, common.listen) {
        (Some((target, address)), ..) => test(target, &Publisher { backend, address, secret, patience }),
        (None, Some(command), Some(listen)) => {
            match ExecServer::start(command.clone(), listen.ip(), listen.port()) {
                Ok(server) => {
                    let address = server.address();
                    let publisher = Publisher { backend, address, secret, patience };
                    test(command, &publisher)
                }
                Err(reason) => broken(&reason),
            }
        }
        _ => {
            eprintln!("what is to be tested? --target or --exec says it");
            ExitCode::from(USAGE)
        }
    }
}

fn test_readers(options: &ReaderRun, folder: &Path) -> ExitCode {
    let Common { select, listen, .. } = &options.common;
    let (patience, folder) = (Duration::from_secs(options.common.patience), folder.to_path_buf());
    match (&options.exec, *listen) {
        (Some(command), Some(listen)) => match (device(), secret(&options.common)) {
            (Ok(backend), Ok(secret)) => {
                let readers = Box::new(ExecReaders(command.clone()));
                let reader = Reader { backend, listen, told: listen, secret, readers, folder, patience };
                terminal::run(command, &reader::cases(), &reader, select)
            }
            (Err(reason), _) => cannot_run(&reason),
            (_, Err(reason)) => broken(&reason),
        },
        (None, None) => {
            let fabric = Fabric::new();
            let (secret, listen) = (SECRET.to_vec(), SocketAddr::from(([192, 0, 2, 66], 7400)));
            let backend = fabric.host(&[listen.ip()]);
            let own = OwnReaders { backend: fabric.host(&[[192, 0, 2, 1].into()]), loses: false };
            let readers = Box::new(own);
            let reader = Reader { backend, listen, told: listen, secret, readers, folder, patience };
            terminal::run("own reader", &reader::cases(), &reader, select)
        }
        _ => {
            eprintln!("what is to be tested? --exec says it, and --listen where it shall connect");
            ExitCode::from(USAGE)
        }
    }
}

struct ExecReaders(String);

impl Readers for ExecReaders {
    fn start(&self, case: &str, publisher: SocketAddr, file: &Path) -> Result<Box<dyn Running>, String> {
        let command = self.0.replace("{file}", &file.display().to_string());
        ExecClients { command, first: 0 }.start(case, publisher)
    }
}
