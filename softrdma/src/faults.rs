//! Parses faults from a command line or a file.

use std::net::IpAddr;
use std::path::Path;

use rdma_softsim::{Chance, Fault, Site};
use serde::Deserialize;
use softrdma_wire as wire;

/// Why a fault is invalid.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: String,
        /// The reason.
        #[source]
        error: std::io::Error,
    },
    /// The file is no list of faults.
    #[error("{path}: {error}")]
    Syntax {
        /// The file.
        path: String,
        /// Where and why.
        #[source]
        error: Box<toml::de::Error>,
    },
    /// No fault has this name.
    #[error("{0:?} is no fault; faults are {known}, with a number where one stands (microseconds, or how often)", known = known())]
    Unknown(String),
    /// More than one time was given, or an invalid one.
    #[error("a fault comes at an event, at a pass through a site ({sites}), or by chance (up to 1): say one of them", sites = sites())]
    When,
    /// More than one choice of connections was given, or an invalid one.
    #[error(
        "a connection goes by its queue pair's number, or by its peer: an address, or an address and a port"
    )]
    Connection,
    /// The fault strikes a whole machine, so no connection can be chosen.
    #[error("{0:?} strikes a machine, not one connection of it")]
    Machine(String),
}

type Make = fn(u32) -> Fault;

/// Faults by name. Those that take a number have an example for it.
const FAULTS: [(&str, Option<u32>, Make); 25] = [
    ("not-ready", Some(2), |times| Fault::NotReady { times: u8::try_from(times).unwrap_or(u8::MAX) }),
    ("link-down", Some(1_000_000), |micros| Fault::LinkDown { micros }),
    ("key-refused", None, |_| Fault::KeyRefused),
    ("receive-gone", None, |_| Fault::ReceiveGone),
    ("source-gone", None, |_| Fault::SourceGone),
    ("queue-lost", None, |_| Fault::QueueLost),
    ("queue-full", None, |_| Fault::QueueFull),
    ("hold", Some(2000), |micros| Fault::Hold { micros }),
    ("spurious", None, |_| Fault::Spurious),
    ("lose", None, |_| Fault::Lose),
    ("lose-answer", None, |_| Fault::LoseAnswer),
    ("address-error", None, |_| Fault::AddressError),
    ("route-error", None, |_| Fault::RouteError),
    ("unreachable", None, |_| Fault::Unreachable),
    ("rejected", Some(28), |reason| Fault::Rejected { reason: i32::try_from(reason).unwrap_or(i32::MAX) }),
    ("connect-error", None, |_| Fault::ConnectError),
    ("slow-ready", Some(100_000), |micros| Fault::SlowReady { micros }),
    ("device-removal", None, |_| Fault::DeviceRemoval),
    ("device-fatal", None, |_| Fault::DeviceFatal),
    ("request-refused", None, |_| Fault::RequestRefused),
    ("address-change", None, |_| Fault::AddressChange),
    ("pair-fatal", None, |_| Fault::PairFatal),
    ("kill", None, |_| Fault::Kill),
    ("exhausted", None, |_| Fault::Exhausted),
    ("stall", Some(200_000), |micros| Fault::Stall { micros }),
];

const SITES: [(&str, Site); 7] = [
    ("post", Site::Post),
    ("arrive", Site::Arrive),
    ("answer", Site::Answer),
    ("report", Site::Report),
    ("create", Site::Create),
    ("resolve", Site::Resolve),
    ("packet", Site::Packet),
];

fn known() -> String {
    let spelled =
        |(name, number, _): &(&str, Option<u32>, Make)| format!("{name}{}", number.map_or("", |_| "=N"));
    FAULTS.iter().map(spelled).collect::<Vec<_>>().join(", ")
}

fn sites() -> String {
    SITES.map(|(name, _)| name).join(", ")
}

/// Lists the names of all faults, with an example number where they take one.
pub fn examples() -> impl Iterator<Item = String> {
    FAULTS.iter().map(|(name, number, _)| match number {
        Some(number) => format!("{name}={number}"),
        None => (*name).into(),
    })
}

/// Parses a fault: `lose`, `not-ready=3`, `link-down=200000`.
pub fn parse(text: &str) -> Result<Fault, Error> {
    let unknown = || Error::Unknown(text.into());
    let (name, number) = match text.split_once('=') {
        Some((name, number)) => (name, Some(number.parse().map_err(|_| unknown())?)),
        None => (text, None),
    };
    let fits = |(known, example, _): &&(&str, Option<u32>, Make)| {
        *known == name && example.is_some() == number.is_some()
    };
    let found = FAULTS.iter().find(fits);
    found.map(|(.., make)| make(number.unwrap_or(0))).ok_or_else(unknown)
}

pub(crate) fn site(name: &str) -> Option<Site> {
    SITES.iter().find(|(known, _)| *known == name).map(|(_, site)| *site)
}

/// A fault as it was written, with where and when it strikes.
#[derive(Clone, Debug, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub struct Written {
    /// The address of the machine that the fault strikes.
    #[arg(long)]
    pub address: IpAddr,
    /// Only the connection of the queue pair with this number; `softrdma status` lists them.
    #[arg(long)]
    pub pair: Option<u32>,
    /// Only connections with a peer at this address, or at this address and port: `192.0.2.2`,
    /// `192.0.2.1:6379`.
    #[arg(long)]
    pub peer: Option<String>,
    /// Strikes after this many events of the fabric, such as messages, answers and completions.
    #[arg(long)]
    pub event: Option<u64>,
    /// Strikes at this pass through a site, such as `arrive:10`.
    #[arg(long)]
    pub pass: Option<String>,
    /// Strikes repeatedly, with this probability at each chance: a number up to 1.
    #[arg(long)]
    pub chance: Option<f64>,
    /// What happens: `lose`, `not-ready=3`, `link-down=200000` (microseconds).
    pub what: String,
}

impl Written {
    /// Checks the fault and converts it to the wire's type.
    pub fn check(&self) -> Result<wire::Fault, Error> {
        let fault = parse(&self.what)?;
        let connections = match (self.pair, &self.peer) {
            (None, None) => wire::Connections::All,
            (Some(number), None) => wire::Connections::Pair(number),
            (None, Some(peer)) => match (peer.parse(), peer.parse()) {
                (Ok(ip), _) => wire::Connections::Peer(ip),
                (_, Ok(address)) => wire::Connections::PeerAt(address),
                _ => return Err(Error::Connection),
            },
            (Some(_), Some(_)) => return Err(Error::Connection),
        };
        if connections != wire::Connections::All && !fault.strikes_connections() {
            return Err(Error::Machine(self.what.clone()));
        }
        let when = match (self.event, &self.pass, self.chance) {
            (event, None, None) => wire::When::Event(event.unwrap_or(0)),
            (None, Some(pass), None) => {
                let (name, pass) = pass.split_once(':').ok_or(Error::When)?;
                site(name).ok_or(Error::When)?;
                wire::When::Pass(name.into(), pass.parse().map_err(|_| Error::When)?)
            }
            (None, None, Some(chance)) if (0.0..=1.0).contains(&chance) => {
                // At most a million.
                wire::When::Chance((chance * Chance::OF as f64) as u32)
            }
            _ => return Err(Error::When),
        };
        Ok(wire::Fault { address: self.address, connections, what: self.what.clone(), when })
    }
}

/// A file of faults: TOML with a `seed`, and a `[[fault]]` for each.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    seed: u64,
    #[serde(default)]
    fault: Vec<Written>,
}

/// Reads a file of faults. Returns the seed and the faults.
pub fn read(path: &Path) -> Result<(u64, Vec<wire::Fault>), Error> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| Error::File { path: name.clone(), error })?;
    let file: File =
        toml::from_str(&text).map_err(|error| Error::Syntax { path: name, error: Box::new(error) })?;
    Ok((file.seed, file.fault.iter().map(Written::check).collect::<Result<_, _>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_a_spelling() {
        let classes: std::collections::BTreeSet<_> =
            examples().map(|text| format!("{:?}", parse(&text).expect("is one"))).collect();
        assert_eq!(classes.len(), FAULTS.len());
        for wrong in ["loose", "lose=1", "hold", "hold=", "hold=-1"] {
            assert!(matches!(parse(wrong), Err(Error::Unknown(_))), "{wrong}");
        }
    }

    #[test]
    fn a_fault_names_a_connection_in_one_way() {
        let written = |pair, peer: Option<&str>, what: &str| {
            let (address, peer, what) = (IpAddr::from([192, 0, 2, 1]), peer.map(Into::into), what.into());
            let written = Written { address, pair, peer, event: None, pass: None, chance: None, what };
            written.check().map(|fault| fault.connections).ok()
        };
        assert_eq!(written(None, None, "kill"), Some(wire::Connections::All));
        assert_eq!(written(Some(7), None, "lose"), Some(wire::Connections::Pair(7)));
        let peer = IpAddr::from([192, 0, 2, 2]);
        assert_eq!(written(None, Some("192.0.2.2"), "link-down=9"), Some(wire::Connections::Peer(peer)));
        let at = wire::Connections::PeerAt((peer, 6379).into());
        assert_eq!(written(None, Some("192.0.2.2:6379"), "rejected=8"), Some(at));
        for wrong in
            [(Some(7), Some("192.0.2.2"), "lose"), (None, Some("6379"), "lose"), (Some(7), None, "kill")]
        {
            assert_eq!(written(wrong.0, wrong.1, wrong.2), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_fault_comes_at_one_time() {
        let written = |event, pass: Option<&str>, chance| {
            let (address, pass, what) = (IpAddr::from([192, 0, 2, 1]), pass.map(Into::into), "lose".into());
            let written = Written { address, pair: None, peer: None, event, pass, chance, what };
            written.check().map(|fault| fault.when).ok()
        };
        assert_eq!(written(None, None, None), Some(wire::When::Event(0)));
        assert_eq!(written(None, Some("arrive:3"), None), Some(wire::When::Pass("arrive".into(), 3)));
        assert_eq!(written(None, None, Some(0.5)), Some(wire::When::Chance(500_000)));
        for wrong in [written(Some(1), None, Some(0.5)), written(None, Some("nowhere:1"), None)] {
            assert_eq!(wrong, None);
        }
        assert_eq!(written(None, None, Some(1.5)), None);
        assert_eq!(written(None, None, Some(f64::NAN)), None);
    }
}
