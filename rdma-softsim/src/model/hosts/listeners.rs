//! The listeners of a device, and the ports that they leave.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::model::base::arena::visit;
use crate::model::base::ids::IdentifierId;

/// Ports given out when none is requested, IANA's dynamic ports.
pub(in crate::model) const FIRST: u16 = 49152;
/// The dynamic ports, in words of as many bits.
const WORDS: usize = (u16::MAX - FIRST + 1) as usize / WORD;
const WORD: usize = u64::BITS as usize;

/// The lowest and the highest address, for ranges of a port's listeners.
const LOWEST: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
const HIGHEST: IpAddr = IpAddr::V6(Ipv6Addr::from_bits(u128::MAX));

/// Listeners by port: a device has few addresses, so that a port has few listeners.
#[derive(Default)]
pub(in crate::model) struct Listeners {
    by_port: BTreeMap<(u16, IpAddr), IdentifierId>,
    /// The dynamic ports that have a listener, a bit for each. Empty if none ever had.
    taken: Vec<u64>,
}

/// Returns the wildcard of the same family.
const fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

impl Listeners {
    /// Returns those at a wildcard, for another device of the machine.
    pub(in crate::model) fn everywhere(&self) -> Self {
        let mut everywhere = Self::default();
        for (&(port, ip), listener) in self.by_port.iter().inspect(|_| visit()) {
            if ip.is_unspecified() {
                everywhere.insert(SocketAddr::new(ip, port), *listener);
            }
        }
        everywhere
    }

    pub(in crate::model) fn insert(&mut self, address: SocketAddr, listener: IdentifierId) {
        self.by_port.insert((address.port(), address.ip()), listener);
        self.mark(address.port());
    }

    /// Removes a listener, unless another one is at its address.
    pub(in crate::model) fn remove(&mut self, address: SocketAddr, listener: IdentifierId) {
        let key = (address.port(), address.ip());
        if self.by_port.get(&key) == Some(&listener) {
            self.by_port.remove(&key);
            self.mark(address.port());
        }
    }

    /// Returns the listener for connections to `address`. A wildcard covers its own family: `::`
    /// takes no IPv4, because the listeners of `rdma-verbs` do not (`RDMA_OPTION_ID_AFONLY`,
    /// `rdma_set_option(3)`).
    pub(in crate::model) fn at(&self, address: SocketAddr) -> Option<IdentifierId> {
        let find = |ip| self.by_port.get(&(address.port(), ip));
        find(address.ip()).or_else(|| find(unspecified(address.ip()))).copied()
    }

    /// Returns whether no further listener can be at `address`.
    pub(in crate::model) fn has_taken(&self, address: SocketAddr) -> bool {
        self.on(address.port()).any(|other| {
            let overlap = other == address.ip() || other.is_unspecified() || address.ip().is_unspecified();
            other.is_ipv4() == address.is_ipv4() && overlap
        })
    }

    /// Returns the addresses with a listener on this port.
    fn on(&self, port: u16) -> impl Iterator<Item = IpAddr> {
        self.by_port.range((port, LOWEST)..=(port, HIGHEST)).inspect(|_| visit()).map(|((_, ip), _)| *ip)
    }

    /// Notes whether a port has a listener.
    fn mark(&mut self, port: u16) {
        let Some(place) = port.checked_sub(FIRST).map(usize::from) else { return };
        let has_some = self.on(port).next().is_some();
        // Few devices have a listener on a dynamic port. Only they need these 2 KiB.
        if self.taken.is_empty() && has_some {
            self.taken.resize(WORDS, 0);
        }
        if let Some(word) = self.taken.get_mut(place / WORD) {
            let bit = 1 << (place % WORD);
            if has_some { *word |= bit } else { *word &= !bit }
        }
    }

    /// Returns the dynamic ports of a word that have a listener.
    pub(in crate::model) fn word(&self, place: usize) -> u64 {
        self.taken.get(place).copied().unwrap_or(0)
    }

    #[cfg(test)]
    pub(in crate::model) fn list(&self) -> Vec<(SocketAddr, IdentifierId)> {
        self.by_port.iter().map(|(&(port, ip), id)| (SocketAddr::new(ip, port), *id)).collect()
    }
}

/// Returns the first dynamic port from `from` on, in a circle, that is free according to `taken`,
/// which returns the taken ones of a word. Looks at words, because one program can take most ports.
pub(in crate::model) fn free_port(from: u16, taken: impl Fn(usize) -> u64) -> Option<u16> {
    let start = usize::from(from.saturating_sub(FIRST));
    // The first word is looked at twice: from the start on, and up to it.
    (0..=WORDS).find_map(|count| {
        let place = (start / WORD + count) % WORDS;
        let behind = !0 << (start % WORD);
        let wanted = match count {
            0 => behind,
            WORDS => !behind,
            _ => !0,
        };
        let free = !taken(place) & wanted;
        // No overflow: the last bit of the last word is port 65535.
        (free != 0).then(|| FIRST + (place * WORD) as u16 + free.trailing_zeros() as u16)
    })
}
