//! Faults into programs that know nothing of them.

mod common;
mod session;

use common::{Home, Running, valkey};
use session::{address, ask, come, open};
use softrdma::fabric::Fabric;
use softrdma::faults;
use softrdma_wire::{Connections, Fault, Reply, Request, When};

const SERVER: &str = "192.0.2.1";
const CLIENT: &str = "192.0.2.2";

fn struck(home: &Home) -> u64 {
    let status = common::succeeded(&home.softrdma(&["status"]).output().expect("runs"));
    status
        .lines()
        .find_map(|line| line.strip_prefix("faults: ")?.split(' ').next()?.parse().ok())
        .unwrap_or(0)
}

/// Every fault befalls an unmodified `valkey-server`, then an unmodified `valkey-cli`, while clients connect and talk. Clients end,
/// whatever they make of it; a server that has not ended serves the next client, or is killed.
#[test]
fn every_fault_befalls_valkey() {
    let (Some(server), Some(client)) = (valkey("valkey-server"), valkey("valkey-cli")) else { return };
    let mut idle = Vec::new();
    for fault in faults::examples() {
        for befallen in [SERVER, CLIENT] {
            let home = Home::new("faults");
            let port = ["--rdma-bind", SERVER, "--rdma-port", "6379", "--port", "0"];
            let quiet = ["--save", "", "--protected-mode", "no"];
            let mut serving =
                Running::start(&mut home.run(SERVER, &[&[server.as_str()], &port[..], &quiet].concat()));
            serving.line("Ready to accept connections rdma");
            let talk = |commands: &[&str]| {
                // Without a time-out an address that is not resolved is waited for.
                let to = [client.as_str(), "--rdma", "-h", SERVER, "-p", "6379", "-t", "1"];
                Running::start(&mut home.run(CLIENT, &[&to, commands].concat()))
            };
            // Somebody who is connected when it comes, and somebody who connects then.
            let mut before = talk(&["-r", "-1", "-i", "0.01", "PING"]);
            before.line("PONG");
            let inject = ["fault", "--address", befallen, &fault];
            common::succeeded(&home.softrdma(&inject).output().expect("runs"));
            let (done, text) = talk(&["-r", "3", "SETRANGE", "key", "100000", "x"]).finish();
            let after =
                if done { format!("{} answers", text.lines().count()) } else { "ended with an error".into() };
            let count = struck(&home);
            println!("| {fault} | {befallen} | struck {count} | a client that came then: {after} |");
            if count == 0 && fault != "kill" {
                idle.push((fault.clone(), befallen));
            }
            drop((before, serving));
            home.is_left();
        }
    }
    // Faults that have nothing to strike on this side, or not in so short a talk.
    println!("nothing to strike: {idle:?}");
    let all: Vec<_> = faults::examples().filter(|fault| fault != "kill").collect();
    for fault in all {
        let never = [SERVER, CLIENT].iter().all(|side| idle.contains(&(fault.clone(), side)));
        assert!(!never, "{fault} struck nobody");
    }
}

/// Of two clients one is struck, by its address; and `status` names the queue pair by which it can be struck again.
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
        let status = common::succeeded(&home.softrdma(&["status"]).output().expect("runs"));
        // Number, machine, state, own address, peer's address.
        status.lines().find_map(|line| {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            let ours = cells.get(2) == Some(&SERVER) && cells.get(5)?.starts_with(machine);
            ours.then(|| cells[1].to_owned())
        })
    };
    let first = pair_of(CLIENT).expect("it is connected");
    inject(&["--peer", CLIENT]);
    // Whatever the client does then, this connection is over.
    let over = |machine: &str, pair: &str| (pair_of(machine).as_deref() != Some(pair)).then_some(());
    common::await_some("the end of a connection", || over(CLIENT, &first));
    assert_eq!(struck(&home), 1);
    other.line("PONG");
    let second = pair_of(spared).expect("it is connected still");
    inject(&["--pair", &second]);
    common::await_some("the end of a connection", || over(spared, &second));
    assert_eq!(struck(&home), 2);
    drop((one, other, serving));
    home.is_left();
}

/// `run --faults` tells the fabric before the program runs, and so before its machine is there.
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

/// What a fault is for is found by the address, also of a machine that comes later; and it strikes once.
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
