//! The rules of verbs that the layers above rely on, as executable cases.
//!
//! Each case is one claim with its man-page source, so that a deviation hides no other, and has one
//! body for all backends. On the embedded fabric it tests the simulator, on a device the device. A
//! row of [`deviations`] says how and why a known provider differs. A difference without a row is a
//! failure, and so is the reverse. Both ends are in this process.

mod asynchronous;
mod connecting;
pub mod deviations;
mod disconnecting;
mod ends;
mod events;
mod failing;
mod owning;
mod queues;
mod receives;
mod refusing;
mod retrying;
mod transferring;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use rdma_backend::Backend;
use suite::{Case, Stop};

/// A backend whose channels have pollable descriptors.
pub trait Descriptors: Backend<EventChannel: AsFd, CompletionQueue: AsFd> {}

impl<B: Backend<EventChannel: AsFd, CompletionQueue: AsFd>> Descriptors for B {}

/// How a rule was broken.
#[derive(Debug)]
pub struct Failure(String);

impl Failure {
    /// Returns a failure with this message.
    pub fn wrong(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::unmet(failure.0)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where the cases run.
#[derive(Clone)]
pub struct Setting<B> {
    /// RDMA of the listening side.
    pub server: B,
    /// RDMA of the connecting side.
    pub client: B,
    /// Where to listen, not empty. Port 0 picks a free port. Most cases use only the first.
    pub addresses: Vec<SocketAddr>,
    /// The provider, which selects the expected deviations; see [`deviations::TABLE`].
    pub provider: String,
}

/// Returns all cases. The first shows that there is something to test at all.
#[must_use]
pub fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    [
        connecting::cases(),
        transferring::cases(),
        receives::cases(),
        retrying::cases(),
        refusing::cases(),
        failing::cases(),
        events::cases(),
        queues::cases(),
        disconnecting::cases(),
        owning::cases(),
        asynchronous::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

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

macro_rules! table {
    ($($id:literal, $claim:literal, $source:literal, $body:ident;)*) => {
        /// The cases of this module.
        pub(super) fn cases<B: $crate::Descriptors>() -> Vec<suite::Case<super::Setting<B>>> {
            vec![$(
                suite::Case::new($id, $claim, &[], |setting, _| {
                    $body(setting).map($crate::Remark::remark)
                })
                .from_source($source),
            )*]
        }
    };
}
use table;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rdma_softsim::SoftSim;

    use super::*;

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
