//! What the layers above believe of verbs, as cases that run.
//!
//! [`rdma_proto::backend`] states the seam in the words of the man pages. Here each rule that something above relies on is
//! a small case with its source, and one body for all backends: on the embedded fabric it shows that the simulator claims
//! nothing that is not so, on a device that the device keeps to the book. Where a provider is known to differ, a row of
//! [`deviations`] says how and why; a difference without a row is a failure, and so is a row without its difference.
//!
//! One case is one claim, so that a deviation hides nothing else. Both ends live in this process.

mod connecting;
pub mod deviations;
mod ends;
mod events;
mod failing;
mod moving;
mod owning;
mod parting;
mod queues;
mod receives;
mod refusing;
mod retrying;

use std::net::{IpAddr, SocketAddr};

use rdma_conn::Descriptors;
use rdma_softsim::{Fabric, SoftSim};
use rdma_verbs::Verbs;

use crate::suite::Case;

/// Where the cases run.
#[derive(Clone)]
pub struct Setting<B> {
    /// RDMA as the listening side has it.
    pub server: B,
    /// RDMA as the connecting side has it.
    pub client: B,
    /// Where to listen, not empty; port 0 takes any. Most cases use the first; those about addresses use all.
    pub addresses: Vec<SocketAddr>,
    /// Whose deviations to expect, see [`deviations::TABLE`].
    pub provider: String,
}

/// The embedded fabric, with two hosts on it.
#[must_use]
pub fn embedded() -> Setting<SoftSim> {
    let fabric = Fabric::new();
    let host = |number: u8| {
        let v6 = IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, number.into()]);
        [IpAddr::from([192, 0, 2, number]), v6]
    };
    Setting {
        server: fabric.host(&host(1)),
        client: fabric.host(&host(2)),
        addresses: host(1).map(|ip| SocketAddr::new(ip, 0)).into(),
        provider: "softsim".into(),
    }
}

/// The device behind `addresses`, with both ends on it.
#[must_use]
pub fn device(verbs: &Verbs, addresses: Vec<SocketAddr>, provider: Option<String>) -> Setting<Verbs> {
    let found = || addresses.first().and_then(|address| deviations::provider_at(address.ip()));
    let provider = provider.or_else(found).unwrap_or_else(|| "unknown".into());
    Setting { server: verbs.clone(), client: verbs.clone(), addresses, provider }
}

/// All cases. The first shows that there is something to test at all.
#[must_use]
pub fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    [
        connecting::cases(),
        moving::cases(),
        receives::cases(),
        retrying::cases(),
        refusing::cases(),
        failing::cases(),
        events::cases(),
        queues::cases(),
        parting::cases(),
        owning::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What a body says when its rule holds: nothing, or something worth reading.
trait Remark {
    fn remark(self) -> String;
}

impl Remark for () {
    fn remark(self) -> String {
        String::new()
    }
}

impl Remark for String {
    fn remark(self) -> String {
        self
    }
}

/// A table of cases: id, claim, source, body.
macro_rules! table {
    ($($id:literal, $claim:literal, $source:literal, $body:ident;)*) => {
        /// The cases of this module.
        pub(super) fn cases<B: rdma_conn::Descriptors>() -> Vec<$crate::suite::Case<super::Setting<B>>> {
            vec![$(
                $crate::suite::Case::new($id, $claim, &[], |setting, _| {
                    $body(setting).map($crate::semantics::Remark::remark)
                })
                .from_source($source),
            )*]
        }
    };
}
use table;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ids_are_unique_and_of_one_form_and_sources_are_named() {
        let cases = cases::<SoftSim>();
        assert!(cases.len() >= 40, "{}", cases.len());
        let ids: BTreeSet<_> = cases.iter().map(|case| case.id).collect();
        assert_eq!(ids.len(), cases.len());
        for case in &cases {
            let parts: Vec<_> = case.id.split('.').collect();
            assert!(matches!(parts[..], ["verbs", area, intent] if !area.is_empty() && !intent.is_empty()));
            assert!(case.source.contains('(') || case.source.contains("IBA"), "{}", case.id);
        }
        for row in deviations::TABLE {
            assert!(ids.contains(row.case), "a deviation of a case that does not exist: {}", row.case);
        }
    }
}
