//! Runs programs with an emulated RDMA device.
#![forbid(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::fs::OpenOptions;
use std::net::{AddrParseError, IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::str::FromStr;

use clap::{Parser, Subcommand};
use comfy_table::{ContentArrangement, Table, presets};
use rdma_program::FAILED;
use rdma_softsim::DeviceKind;
use rustix::io::FdFlags;
use softrdma::doctor;
use softrdma::faults::{self, Written};
use softrdma::runtime::{Error, Libraries, Place, exchange, has_rdma_core, view};
use softrdma_wire::{
    ADDRESSES, Amounts, Exceeded, Failure, MEMLOCK, Pair, Reply, Request, SOCKET, Session, Socket,
    format_devices, parse_addresses,
};

/// How many columns the output has if no terminal states its width.
const WIDTH: usize = 120;

const EXAMPLES: &str = "\
Examples:
  softrdma run -- valkey-server --rdma-bind 192.0.2.1 --rdma-port 6379 \\
      --protected-mode no
  softrdma run --address 192.0.2.2 -- valkey-cli --rdma -h 192.0.2.1 -p 6379
  softrdma status
  softrdma fault --address 192.0.2.1 not-ready=3

`run` becomes the program: from then on, the exit status is the program's own.";

/// Soft RDMA for unmodified programs: no device, no kernel module, no root.
#[derive(Parser)]
#[command(version, max_term_width = WIDTH, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Runs a program with an RDMA device.
    Run {
        /// The fabric's name: the programs of one user on the fabric of one name reach each other.
        #[arg(long, default_value = "default")]
        fabric: String,
        /// The addresses of the machine's device, separated by commas. Repeat the option for each
        /// further device, of which softrdma1 is the second. Programs with the same devices are on
        /// one machine.
        #[arg(long, default_value = "192.0.2.1")]
        address: Vec<Addresses>,
        /// A file of faults for machines of the fabric: TOML, with a `seed` and a `[[fault]]` for
        /// each, of the fields `address`, `what`, and `pair`, `peer`, `event`, `pass` or `chance`
        /// as `softrdma fault` has them.
        #[arg(long)]
        faults: Option<PathBuf>,
        /// Records all messages on the fabric, from now on until its last program has ended, as the
        /// packets that RoCE v2 would carry: a pcapng file, which is overwritten.
        #[arg(long)]
        record: Option<PathBuf>,
        /// Microseconds that a message travels, one way, on the whole fabric from now on, besides
        /// the machine's own time.
        #[arg(long)]
        latency: Option<u32>,
        /// The kind of the fabric's devices from now on: they behave like this kind where verbs
        /// leaves a device a choice.
        #[arg(long, value_parser = DeviceKind::ALL.map(DeviceKind::name))]
        device_kind: Option<String>,
        /// Completion vectors of the fabric's devices from now on. Each has a thread of the fabric
        /// that raises its events: vector-0, vector-1 and so on, which can be pinned to processors.
        /// By default there are two vectors, and the thread that adds a completion raises its
        /// event.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
        vectors: Option<u32>,
        /// Makes the program's TCP sockets rsockets, by rdma-core's librspreload.so. Its own
        /// librdmacm then runs above the device, also for programs that call it themselves.
        #[arg(long)]
        rsockets: bool,
        /// Has the limit on locked memory (`ulimit -l`) apply to registered memory, as Linux does
        /// for programs without CAP_IPC_LOCK. By default there is no limit.
        #[arg(long)]
        memlock: bool,
        /// The program and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Shows the programs on a fabric, what they hold, and their connections.
    Status {
        /// The fabric's name.
        #[arg(long, default_value = "default")]
        fabric: String,
    },
    /// Injects a fault into a machine of a running fabric, or into connections of it.
    Fault {
        /// The fabric's name.
        #[arg(long, default_value = "default")]
        fabric: String,
        /// The seed from which faults by chance are drawn.
        #[arg(long)]
        seed: Option<u64>,
        #[command(flatten)]
        fault: Written,
    },
    /// Reports whether programs can run here, and what is missing.
    Doctor,
    /// Runs the fabric. `run` starts it.
    #[command(hide = true)]
    Fabric { directory: PathBuf },
}

/// The addresses of one device.
#[derive(Clone)]
struct Addresses(Vec<IpAddr>);

impl FromStr for Addresses {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        parse_addresses(text).map(Self)
    }
}

fn main() -> ExitCode {
    rdma_program::run(|Arguments { action }| {
        act(action).unwrap_or_else(|error| {
            eprintln!("{}", wrapped(&format!("softrdma: {error}")));
            ExitCode::from(FAILED)
        })
    })
}

fn act(action: Action) -> Result<ExitCode, Error> {
    match action {
        Action::Run {
            fabric,
            address,
            faults,
            record,
            latency,
            device_kind,
            vectors,
            rsockets,
            memlock,
            command,
        } => {
            let place = Place::of(&fabric)?;
            let libraries = place.libraries()?;
            // Keeps the fabric alive until the program, which replaces this one, has ended: the
            // request for as long as the process lives, the socket for as long as a child has it.
            let mut presence = place.enter()?;
            tell(&mut presence, &Request::Stay, None)?
                .map_err(|error| Error::System { what: "the fabric".into(), error })?;
            if latency.is_some() || device_kind.is_some() || vectors.is_some() {
                let change = Request::Configure { latency, device_kind, vectors };
                tell(&mut presence, &change, None)?
                    .map_err(|error| Error::System { what: "a change of the fabric".into(), error })?;
            }
            if let Some(path) = record {
                record_in(&mut presence, path)?;
            }
            if let Some(file) = faults {
                let (seed, faults) = faults::read(&file)?;
                inject(&mut presence, Some(seed), faults)?;
            }
            let devices: Vec<_> = address.into_iter().map(|Addresses(addresses)| addresses).collect();
            let preload = if rsockets { libraries.rsockets()?.to_vec() } else { vec![libraries.preload()] };
            run(&place, &libraries, &preload, &presence, &devices, memlock, &command)
        }
        Action::Fault { fabric, seed, fault } => {
            let mut socket = running(&fabric)?;
            inject(&mut socket, seed, vec![fault.check()?])?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Status { fabric } => status(&fabric),
        Action::Doctor => {
            println!("{}", wrapped(&doctor::report()?));
            Ok(ExitCode::SUCCESS)
        }
        Action::Fabric { directory } => {
            Place::host(&directory, || {
                // The program that started this one waits until this standard output is closed.
                let _told = rustix::stdio::dup2_stdout(rustix::stdio::stderr());
            })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn inject(socket: &mut Socket, seed: Option<u64>, faults: Vec<softrdma_wire::Fault>) -> Result<(), Error> {
    tell(socket, &Request::Inject { seed, faults }, None)?.map_err(|_refused| Error::Fault)
}

fn record_in(socket: &mut Socket, path: PathBuf) -> Result<(), Error> {
    let failed = |error| Error::Record { path: path.clone(), error };
    // The fabric empties the file, unless it refuses the request: it may be writing to it already.
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(failed)?;
    tell(socket, &Request::Record, Some(file.as_fd()))?.map_err(failed)
}

/// Sends a request that has no answer but success or a refusal.
fn tell(
    socket: &mut Socket,
    request: &Request<'_>,
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<Result<(), std::io::Error>, Error> {
    match exchange(socket, request, descriptor)? {
        Reply::Refused(errno) => Ok(Err(std::io::Error::from_raw_os_error(errno))),
        _ => Ok(Ok(())),
    }
}

/// Replaces this program by the given one.
fn run(
    place: &Place,
    libraries: &Libraries,
    preload: &[PathBuf],
    presence: &Socket,
    devices: &[Vec<IpAddr>],
    memlock: bool,
    command: &[OsString],
) -> Result<ExitCode, Error> {
    rustix::io::fcntl_setfd(presence, FdFlags::empty())
        .map_err(|errno| Error::System { what: "the fabric's socket".into(), error: errno.into() })?;
    // The command line always has a program.
    let [program, arguments @ ..] = command else { return Ok(ExitCode::FAILURE) };
    let mut started = Command::new(program);
    started
        .args(arguments)
        .env(SOCKET, place.socket())
        .env(ADDRESSES, format_devices(devices))
        .envs(memlock.then_some((MEMLOCK, "1")))
        .env(view(), place.show(devices)?)
        .env("LD_PRELOAD", before(preload, "LD_PRELOAD"));
    if !has_rdma_core() {
        started.env("LD_LIBRARY_PATH", before(&[libraries.search().into()], "LD_LIBRARY_PATH"));
    }
    // From here on, signals and the exit status are the program's own.
    Err(Error::System { what: program.to_string_lossy().into_owned(), error: started.exec() })
}

/// Returns a list of paths from the environment, with these in front.
fn before(first: &[PathBuf], variable: &str) -> OsString {
    let others = std::env::var_os(variable).filter(|others| !others.is_empty());
    let all: Vec<_> = first.iter().map(|path| path.as_os_str().to_owned()).chain(others).collect();
    all.join(OsStr::new(":"))
}

fn running(fabric: &str) -> Result<Socket, Error> {
    Place::at(fabric)?.connect()?.ok_or_else(|| Error::Nothing(fabric.into()))
}

fn status(fabric: &str) -> Result<ExitCode, Error> {
    let mut socket = running(fabric)?;
    let mut ask = |request: &Request<'_>| exchange(&mut socket, request, None);
    let Reply::Status { sessions, struck, failures, vectors, used, most, refused } = ask(&Request::Status)?
    else {
        return Err(Error::Refused);
    };
    let mut pairs: Vec<Pair> = Vec::new();
    while let Reply::Pairs(more) = ask(&Request::Pairs { above: pairs.last().map_or(0, |pair| pair.number) })?
        && !more.is_empty()
    {
        pairs.extend(more);
    }
    let left = left_by_valkey(&sessions);
    println!("{}", present(sessions));
    if let Some(left) = left {
        println!("{}", wrapped(&left));
    }
    if !pairs.is_empty() {
        println!("\n{}", connections(&pairs));
    }
    if !failures.is_empty() {
        println!("\n{}", classes(&failures));
    }
    if !vectors.is_empty() {
        let counts: Vec<_> = vectors.iter().map(u64::to_string).collect();
        println!("events of completion vectors: {}", counts.join(", "));
    }
    if struck > 0 {
        println!("faults: {struck} so far");
    }
    println!("\n{}", wrapped(&taken(&used, &most, &refused)));
    Ok(ExitCode::SUCCESS)
}

/// Wraps a text into lines of at most `WIDTH` columns, unless a word is longer.
fn wrapped(text: &str) -> String {
    let mut result = String::new();
    for line in text.lines() {
        let mut width = 0;
        for word in line.split(' ') {
            let len = word.chars().count();
            if width > 0 && width + 1 + len > WIDTH {
                result.push('\n');
                width = 0;
            } else if width > 0 {
                result.push(' ');
                width += 1;
            }
            result.push_str(word);
            width += len;
        }
        result.push('\n');
    }
    result.truncate(result.trim_end().len());
    result
}

/// Makes a table as wide as the terminal, or `WIDTH` without one.
fn table() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Dynamic);
    let terminal = rustix::termios::tcgetwinsize(std::io::stdout()).ok().filter(|size| size.ws_col > 0);
    table.set_width(terminal.map_or(WIDTH as u16, |size| size.ws_col));
    table
}

fn present(sessions: Vec<Session>) -> Table {
    let mut table = table();
    table.set_header([
        "program",
        "process",
        "devices",
        "domains",
        "regions",
        "bytes",
        "queues",
        "pairs",
        "identifiers",
        "requests",
    ]);
    for session in sessions {
        let device = |(number, addresses): (usize, &Vec<IpAddr>)| {
            let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            format!("softrdma{number}: {}", addresses.join(" "))
        };
        let devices: Vec<String> = session.devices.iter().enumerate().map(device).collect();
        table.add_row([
            session.program,
            session.pid.to_string(),
            devices.join("\n"),
            session.domains.to_string(),
            session.regions.to_string(),
            session.registered_bytes.to_string(),
            session.completion_queues.to_string(),
            session.queue_pairs.to_string(),
            session.identifiers.to_string(),
            session.requests.to_string(),
        ]);
    }
    table
}

/// States what programs have taken of the fabric, and what was refused.
fn taken(used: &Amounts, most: &Amounts, refused: &[(Exceeded, u64)]) -> String {
    let (memory, all) = (used.memory.div_ceil(1 << 20), most.memory >> 20);
    let mut text = format!(
        "taken: {memory} of {all} MiB for objects, {} of {} descriptors, {} of {} sessions",
        used.descriptors, most.descriptors, used.sessions, most.sessions
    );
    for (exceeded, times) in refused {
        text += &format!("\nrefused {times} times: {exceeded}");
    }
    text
}

/// Explains what Valkey servers keep of connections that have ended, as it looks like a leak of the
/// fabric.
fn left_by_valkey(sessions: &[Session]) -> Option<String> {
    let valkey = |session: &&Session| session.program.contains("valkey") || session.program.contains("redis");
    // One domain may belong to a connection that is being established.
    let kept = |session: &Session| session.domains.saturating_sub(session.queue_pairs);
    let kept: u32 = sessions.iter().filter(valkey).map(kept).filter(|kept| *kept > 1).sum();
    (kept > 0).then(|| {
        format!(
            "{kept} protection domains without a queue pair are Valkey's, and no leak of the fabric: Valkey releases a \
             connection's domain and completion queue while its queue pair still uses them, so both stay until the process ends."
        )
    })
}

/// Makes a table of the classes of failure that occurred on a fabric.
fn classes(failures: &[Failure]) -> Table {
    let mut table = table();
    table.set_header(["failure", "brought about", "met by a program"]);
    for Failure { words, injected, observed } in failures {
        table.add_row([words.clone(), injected.to_string(), observed.to_string()]);
    }
    table
}

fn connections(pairs: &[Pair]) -> Table {
    const STATES: [&str; 7] = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"];
    let mut table = table();
    table.set_header(["queue pair", "machine", "state", "address", "peer's address", "peer's queue pair"]);
    let address = |known: Option<SocketAddr>| match known {
        None => String::new(),
        Some(address) if address.port() == 0 => address.ip().to_string(),
        Some(address) => address.to_string(),
    };
    for pair in pairs {
        table.add_row([
            pair.number.to_string(),
            pair.machine.map_or_else(String::new, |ip| ip.to_string()),
            STATES.get(usize::from(pair.state)).unwrap_or(&"").to_string(),
            address(pair.local),
            address(pair.remote),
            pair.peer.map_or_else(String::new, |number| number.to_string()),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use softrdma_wire::Resource;

    use super::*;

    fn fits(text: &str) {
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{} columns: {line}", line.chars().count());
        }
    }

    /// What Valkey keeps is told apart from other programs' objects, and from live connections.
    #[test]
    fn what_valkey_keeps_is_said_to_be_valkeys() {
        let session = |program: &str, domains, queue_pairs| Session {
            program: program.into(),
            pid: 1,
            devices: Vec::new(),
            domains,
            regions: 0,
            registered_bytes: 0,
            completion_queues: domains,
            queue_pairs,
            identifiers: 0,
            requests: 0,
        };
        let told = left_by_valkey(&[session("valkey-server", 175, 0), session("rping", 9, 0)]);
        assert!(told.is_some_and(|told| told.starts_with("175 protection domains")));
        assert_eq!(left_by_valkey(&[session("valkey-server", 30, 30), session("rping", 9, 0)]), None);
    }

    #[test]
    fn what_is_printed_without_a_terminal_is_at_most_120_columns_wide() {
        let ip = IpAddr::from([u8::MAX; 16]);
        let session = Session {
            program: "valkey-server-with-a-long-name ".repeat(2),
            pid: u32::MAX,
            devices: vec![vec![ip]; 16],
            domains: u32::MAX,
            regions: u32::MAX,
            registered_bytes: u64::MAX,
            completion_queues: u32::MAX,
            queue_pairs: u32::MAX,
            identifiers: u32::MAX,
            requests: u64::MAX,
        };
        fits(&present(vec![session]).to_string());
        let address = Some((ip, u16::MAX).into());
        let (number, peer) = (u32::MAX, Some(u32::MAX));
        let pair = Pair { number, machine: Some(ip), state: 6, local: address, remote: address, peer };
        fits(&connections(&[pair]).to_string());
        let amounts = Amounts { memory: u64::MAX, descriptors: u64::MAX, sessions: u64::MAX };
        for resource in Resource::ALL {
            let exceeded = Exceeded { resource, each: false, most: u64::MAX };
            fits(&wrapped(&taken(&amounts, &amounts, &[(exceeded, u64::MAX)])));
        }
        let words = "a class of failure that takes many words to say ".repeat(4);
        fits(&classes(&[Failure { words, injected: u64::MAX, observed: u64::MAX }]).to_string());
        // The error names all faults.
        let unknown = faults::parse("?").expect_err("no fault");
        fits(&wrapped(&format!("softrdma: {}", Error::from(unknown))));
        fits(&wrapped(&format!("softrdma: {}", Error::Fault)));
        let mut command = Arguments::command();
        command.build();
        for action in command.get_subcommands_mut() {
            fits(&action.render_long_help().to_string());
        }
        fits(&command.render_long_help().to_string());
        assert_eq!(wrapped("one two\n\nthree"), "one two\n\nthree");
    }
}
