//! Injects faults into unmodified programs.

mod common;
mod faults_page;
mod session;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};

use common::{Home, Running, valkey};
use rdma_softsim::FailureClass::{self, BufferOwnership};
use session::{address, ask, come, open};
use softrdma::fabric::Fabric;
use softrdma::faults;
use softrdma_wire::{Connections, Fault, Reply, Request, When};

const SERVER: &str = "192.0.2.1";
const CLIENT: &str = "192.0.2.2";

fn status(home: &Home) -> String {
    common::succeeded(&home.softrdma(&["status"]).output().expect("runs"))
}

/// Returns how many faults have struck, as `softrdma status` says.
fn struck(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("faults: ")?.split(' ').next()?.parse().ok())
        .unwrap_or(0)
}

/// Faults that do not strike an established connection. The others strike that of a client that
/// sends requests all the time.
///
/// `receive-gone` is among them because the memory of a receive is for messages, and an idle
/// connection has none.
const AT_CONNECTING: [&str; 9] = [
    "receive-gone",
    "address-error",
    "route-error",
    "unreachable",
    "rejected",
    "connect-error",
    "slow-ready",
    "exhausted",
    "kill",
];

/// What a fault did to Valkey's programs.
struct Befallen {
    fault: String,
    struck: u64,
    /// What a client got that connected then.
    after: String,
    /// The classes of failure that occurred, and how often.
    classes: BTreeMap<&'static str, (u64, u64)>,
    /// Whether no program crashed, except by `kill`: the server serves until it is asked to end,
    /// and no signal ends a client.
    all_live: bool,
}

/// Injects a fault into the machine at this address while clients talk to a server, and waits until
/// they end.
fn befall(server: &str, client: &str, fault: &str, address: &str) -> Befallen {
    let home = Home::new("faults");
    // Keeps the fabric and its counts alive when other programs end.
    let mut keeper = home.run(CLIENT, &["cat"]).stdin(Stdio::piped()).spawn().expect("starts");
    let arguments =
        ["--rdma-bind", SERVER, "--rdma-port", "6379", "--port", "0", "--save", "", "--protected-mode", "no"];
    let mut serving = Running::start(&mut home.run(SERVER, &[&[server], &arguments[..]].concat()));
    serving.line("Ready to accept connections rdma");
    let talk = |patience: &str, commands: &[&str]| {
        let to = [client, "--rdma", "-h", SERVER, "-p", "6379", "-t", patience];
        Running::start(&mut home.run(CLIENT, &[&to, commands].concat()))
    };
    // One client is connected when the fault is injected, however long that takes on a busy
    // machine; another connects then.
    let mut before = talk("60", &["-r", "-1", "-i", "0.01", "PING"]);
    before.line("PONG");
    let inject = ["fault", "--address", address, fault];
    common::succeeded(&home.softrdma(&inject).output().expect("runs"));
    // A fault at connecting may leave a client waiting without limit: it has no timeout for the
    // server's first window.
    if !AT_CONNECTING.contains(&fault.split('=').next().unwrap_or(fault)) {
        common::await_some(&format!("{fault} at {address}"), || (struck(&status(&home)) > 0).then_some(()));
    }
    // Without a timeout, the client would wait for an address that is not resolved.
    let (ended, text) = talk("1", &["-r", "3", "SETRANGE", "key", "100000", "x"]).ended();
    let answers = text.lines().filter(|line| line.starts_with("(integer)") || *line == "100001").count();
    let after = if ended.success() { format!("{answers} of 3 answers") } else { "an error".into() };
    // A message whose answer was lost is repeated, but only after a while.
    let repeated = |status: &String| fault != "lose-answer" || status.contains(BufferOwnership.words());
    let status = common::await_some("a repetition", || Some(status(&home)).filter(repeated));
    let count = |class: &FailureClass| {
        let line = status.lines().find_map(|line| line.strip_prefix("| ")?.strip_prefix(class.words()))?;
        let mut cells = line.split('|').filter_map(|cell| cell.trim().parse().ok());
        Some((class.words(), (cells.next()?, cells.next()?)))
    };
    let by_signal = |ended: ExitStatus| ended.signal().is_some();
    let clients_live = !by_signal(ended) && !before.status().is_some_and(by_signal);
    let server_lives = serving.asked_to_end().success();
    let befallen = Befallen {
        fault: fault.into(),
        struck: struck(&status),
        after,
        classes: FailureClass::ALL.iter().filter_map(count).collect(),
        all_live: fault == "kill" || (clients_live && server_lives),
    };
    drop((before, keeper.stdin.take()));
    assert!(keeper.wait().expect("a child").success());
    home.is_left();
    befallen
}

/// Injects every fault into an unmodified `valkey-server`, then into an unmodified `valkey-cli`.
/// With `RENEW` it writes docs/softrdma-faults.md.
#[test]
fn every_fault_befalls_valkey() {
    let (Some(server), Some(client)) = (valkey("valkey-server"), valkey("valkey-cli")) else { return };
    let all: Vec<[Befallen; 2]> = faults::examples()
        .map(|fault| [SERVER, CLIENT].map(|address| befall(&server, &client, &fault, address)))
        .collect();
    let page = faults_page::write(&all);
    println!("{page}");
    if std::env::var_os("RENEW").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/softrdma-faults.md"), page)
            .expect("a file");
    }
    for sides in &all {
        // `kill` acts at once, from outside the model, so it does not count as a fault that struck.
        let strikes = sides.iter().any(|side| side.struck > 0) || sides[0].fault == "kill";
        assert!(strikes, "{} did not strike", sides[0].fault);
    }
    for class in FailureClass::ALL {
        let came = all.iter().flatten().any(|side| side.classes.contains_key(class.words()));
        assert!(came || faults_page::about(*class).1.is_some(), "no {}", class.words());
    }
}

/// A fault strikes one of two clients, chosen by its address. `status` names the queue pair of the
/// other, by which it is struck next.
#[test]
fn a_fault_befalls_one_client_of_two() {
    let (Some(server), Some(client)) = (valkey("valkey-server"), valkey("valkey-cli")) else { return };
    let home = Home::new("faults-connection");
    let arguments =
        ["--rdma-bind", SERVER, "--rdma-port", "6379", "--port", "0", "--save", "", "--protected-mode", "no"];
    let mut serving = Running::start(&mut home.run(SERVER, &[&[server.as_str()], &arguments[..]].concat()));
    serving.line("Ready to accept connections rdma");
    let talk = |address: &str| {
        let to = [client.as_str(), "--rdma", "-h", SERVER, "-p", "6379", "-r", "-1", "-i", "0.01", "PING"];
        Running::start(home.run(address, &to).stderr(std::process::Stdio::null()))
    };
    let spared = "192.0.2.3";
    let (mut one, mut other) = (talk(CLIENT), talk(spared));
    one.line("PONG");
    other.line("PONG");
    let inject = |which: &[&str]| {
        let arguments = [&["fault", "--address", SERVER], which, &["key-refused"]].concat();
        common::succeeded(&home.softrdma(&arguments).output().expect("runs"));
    };
    let pair_of = |machine: &str| {
        let status = status(&home);
        // The cells are number, machine, state, own address and peer's address.
        status.lines().find_map(|line| {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            let ours = cells.get(2) == Some(&SERVER) && cells.get(5)?.starts_with(machine);
            ours.then(|| cells[1].to_owned())
        })
    };
    let first = pair_of(CLIENT).expect("it is connected");
    inject(&["--peer", CLIENT]);
    // Whatever the client does then, this connection has ended.
    let over = |machine: &str, pair: &str| (pair_of(machine).as_deref() != Some(pair)).then_some(());
    common::await_some("the end of a connection", || over(CLIENT, &first));
    assert_eq!(struck(&status(&home)), 1);
    other.line("PONG");
    let second = pair_of(spared).expect("it is connected still");
    inject(&["--pair", &second]);
    common::await_some("the end of a connection", || over(spared, &second));
    assert_eq!(struck(&status(&home)), 2);
    drop((one, other, serving));
    home.is_left();
}

/// `run --faults` tells the fabric before the program runs, and so before its machine exists.
#[test]
fn a_file_of_faults_waits_for_its_machine() {
    let home = Home::new("faults-file");
    let file = home.path().join("faults.toml");
    let run = |text: &str| {
        std::fs::write(&file, text).expect("a file");
        let file = file.to_str().expect("a path in UTF-8");
        home.softrdma(&["run", "--address", SERVER, "--faults", file, "--", "true"]).output().expect("runs")
    };
    let fault = "seed = 7\n[[fault]]\naddress = \"192.0.2.1\"\nwhat = \"exhausted\"\nevent = 0\n";
    common::succeeded(&run(fault));
    for wrong in [fault.replace("exhausted", "exhaustion"), fault.replace("event", "events")] {
        assert!(!run(&wrong).status.success(), "{wrong}");
    }
    home.is_left();
}

/// A fault waits for the machine with its address, and strikes once.
#[test]
fn a_fault_waits_for_its_machine() {
    let fabric = Fabric::new().expect("a fabric");
    let fault = |when, what: &str| Fault {
        address: address(1),
        connections: Connections::All,
        what: what.into(),
        when,
    };
    let inject = |fault| ask(&mut come(&fabric), &Request::Inject { seed: Some(1), faults: vec![fault] });
    assert_eq!(inject(fault(When::Event(0), "exhausted")), Reply::Done);
    let mut spared = open(&fabric, 2);
    assert!(matches!(ask(&mut spared, &Request::AllocateDomain(0)), Reply::Made(_)));
    let mut befallen = open(&fabric, 1);
    assert!(matches!(ask(&mut befallen, &Request::AllocateDomain(0)), Reply::Refused(_)));
    assert!(matches!(ask(&mut befallen, &Request::AllocateDomain(0)), Reply::Made(_)));
    for wrong in [
        fault(When::Event(0), "exhaustion"),
        fault(When::Pass("nowhere".into(), 1), "lose"),
        fault(When::Chance(1), "link-down=1"),
        fault(When::Event(9), "kill"),
    ] {
        assert!(matches!(inject(wrong), Reply::Refused(_)));
    }
}
