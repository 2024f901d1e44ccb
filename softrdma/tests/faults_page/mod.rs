//! Writes the page that says what each fault did to Valkey's programs: docs/softrdma-faults.md.

use std::fmt::Write as _;

use rdma_softsim::FailureClass::{self, *};

use super::Befallen;

/// Returns the requirements about a class (spec/requirements.md), and where it occurs if no counted
/// fault causes it.
pub(crate) const fn about(class: FailureClass) -> (&'static str, Option<&'static str>) {
    match class {
        ReceiverNotReady => ("VR-CONN-004, VR-FLOW-005, VR-FLOW-008, VR-RES-002", None),
        RetriesExceeded => ("VR-CLOSE-003, VR-CONN-008", None),
        AccessRefused => ("VR-SEC-011, VR-CLOSE-006", None),
        EmptyWrite => (
            "VR-XFER-005, VR-XFER-006",
            Some("peers of the suite, not counted: `lab/run test --soft conformance-valkey`, `xfer.zero*`"),
        ),
        ReceiveTooSmall => ("VR-RES-003, VR-SEC-004", Some(PEERS)),
        ReceiveMemoryGone => ("VR-CLOSE-003, VR-CLOSE-006", None),
        LocalProtection => ("VR-CLOSE-006, VR-CLOSE-008", None),
        Deregistered => (
            "VR-MEM-019, VR-SEC-010",
            Some("in the simulator: Valkey's programs give back no key that pending work uses"),
        ),
        UnsignaledFails => ("VR-CLOSE-003, VR-CLOSE-008", None),
        Flush => ("VR-CLOSE-008", None),
        ErrorContents => ("VR-CLOSE-008", None),
        QueueOverrun => ("VR-RES-011", None),
        SendQueueFull => ("VR-FLOW-011", None),
        DeviceLimits => ("VR-RES-009", Some("Valkey asks for less than a device of softrdma has")),
        CompletionOrder => ("VR-CLOSE-002", None),
        NotificationRace => ("VR-CLOSE-003", None),
        EventCoalescing => ("VR-CLOSE-003", None),
        EventAcknowledgement => ("VR-RES-001", None),
        DataVisibility => (
            "VR-XFER-008",
            Some(
                "in the simulator alone (`valkey-rdma-trust sim`): a program may look at its memory without a completion, as `ib_write_lat` does",
            ),
        ),
        BufferOwnership => ("VR-XFER-011", None),
        PacketLoss => ("VR-XFER-001", None),
        ConnectionSetup => ("VR-CONN-006, VR-CONN-008", None),
        EstablishmentRace => ("VR-CONN-007", None),
        DisconnectMidWrite => ("VR-CLOSE-003, VR-XFER-012", Some("`kill`")),
        AbruptEvent => ("VR-CONN-014, VR-CLOSE-003", None),
        TeardownOrder => ("VR-RES-001", None),
        Exhaustion => ("VR-RES-006", None),
        SlowConsumer => ("VR-RES-004, VR-RES-005, VR-FLOW-012", None),
        WrongPeer => ("VR-SEC-003, VR-SEC-004, VR-CLOSE-007", Some(PEERS)),
        Scheduling => (
            "VR-CLOSE-002, VR-CONN-008",
            Some("programs are processes, which the kernel interrupts anywhere; `stall`"),
        ),
    }
}

/// Where classes occur that only a peer causes.
const PEERS: &str = "peers of the suite: `lab/run test --soft conformance-valkey`";

const HEAD: &str = "\
# Faults into Valkey's programs

What each fault of `softrdma fault` did to an unmodified `valkey-server` and an unmodified `valkey-cli` of version 9.1.2, during three commands of
100 kB and with a client that sends requests all the time. The effect on a client depends on when the fault strikes.
`RENEW=1 cargo test -p softrdma --test faults every_fault` injects each fault again, and writes this page. A client that got an error
exited; no signal ended it.
";

const BY_FAULT: &str = "
| fault | into the server: struck | a client that came then got | into the client: struck | it got |
|---|--:|---|--:|---|
";

const BY_CLASS: &str = "
## By class

The simulator counts 30 classes of failure. For each class the table has the faults that caused it here, how often the fabric brought it about, and how
often a program met it. Classes that accompany others (flushes, the order of teardown, events) occur with most faults. The requirements are
those about the class ([spec/requirements.md](../spec/requirements.md)).

| class | requirements | by | brought about, met |
|---|---|---|--:|
";

/// How many faults are named for a class: the first ones, in the order of the table of faults.
const NAMED: usize = 4;

/// Writes the page. It leaves out each fault that brought a program down: its row, its counts, and
/// the rows of classes that only such faults caused.
pub(crate) fn write(all: &[[Befallen; 2]]) -> String {
    let shown: Vec<_> = all.iter().filter(|sides| sides.iter().all(|side| side.all_live)).collect();
    let mut by_fault = String::from(BY_FAULT);
    for [server, client] in &shown {
        let _written = writeln!(
            by_fault,
            "| `{}` | {} | {} | {} | {} |",
            server.fault, server.struck, server.after, client.struck, client.after
        );
    }
    let mut withheld = all.len() - shown.len();
    let mut by_class = String::from(BY_CLASS);
    for class in FailureClass::ALL {
        let (requirements, how) = about(*class);
        let of = |side: &Befallen| side.classes.get(class.words()).copied();
        let came: Vec<_> =
            shown.iter().copied().flatten().filter_map(|side| Some((side, of(side)?))).collect();
        let sum = came.iter().fold((0, 0), |sum, (_, count)| (sum.0 + count.0, sum.1 + count.1));
        let mut by: Vec<_> = came.iter().map(|(side, _)| format!("`{}`", side.fault)).collect();
        by.dedup();
        if by.len() > NAMED {
            by.truncate(NAMED);
            by.push("others".into());
        }
        by.extend(how.map(String::from));
        if by.is_empty() {
            withheld += 1;
            continue;
        }
        let _written = writeln!(
            by_class,
            "| {} | {requirements} | {} | {}, {} |",
            class.words(),
            by.join(", "),
            sum.0,
            sum.1
        );
    }
    let withheld = format!(
        "Both tables leave out each fault that brought a program down, with its counts ([SECURITY.md](../SECURITY.md)): rows withheld: {withheld}.\n"
    );
    [HEAD, &withheld, &by_fault, &by_class].concat()
}
