//! Slots of a cluster, and the nodes that serve them.

use std::net::{IpAddr, SocketAddr};

pub(crate) const SLOTS: u16 = 16384;

/// The most nodes in a map of slots: as many as Valkey's documentation allows.
const MOST_NODES: usize = 1000;

/// Returns the slot of a key. If there is text between the first `{` and the first `}` after it,
/// only that is hashed, otherwise the whole key.
pub(crate) fn slot(key: &[u8]) -> u16 {
    crc16(hashed(key)) % SLOTS
}

fn hashed(key: &[u8]) -> &[u8] {
    let behind = key.iter().position(|byte| *byte == b'{').and_then(|open| key.get(open + 1..));
    let tag = behind.and_then(|behind| {
        let close = behind.iter().position(|byte| *byte == b'}')?;
        behind.get(..close)
    });
    tag.filter(|tag| !tag.is_empty()).unwrap_or(key)
}

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| match crc & 0x8000 {
            0 => crc << 1,
            _ => (crc << 1) ^ 0x1021,
        })
    })
}

#[derive(Debug, Default)]
pub(crate) struct Slots {
    nodes: Vec<String>,
    /// For each slot the index of its primary in `nodes`; empty when nothing is known.
    places: Vec<Option<u16>>,
}

impl Slots {
    /// Parses the `CLUSTER NODES` of the node at `from`, which may leave out its own address.
    /// `None` if it is invalid, names no slot, or has too many.
    pub(crate) fn parse(text: &str, from: &str) -> Option<Self> {
        let mut slots = Self { nodes: Vec::new(), places: vec![None; usize::from(SLOTS)] };
        for line in text.lines() {
            let mut fields = line.split(' ');
            let (_id, address, flags) = (fields.next()?, fields.next()?, fields.next()?);
            let is = |flag| flags.split(',').any(|one| one == flag);
            if !is("master") || is("fail") || is("noaddr") || is("handshake") {
                continue;
            }
            // Next come the node's primary, two times, an epoch and the state of a link.
            let ranges = fields.skip(5).filter(|range| !range.starts_with('['));
            let mut ranges = ranges.peekable();
            if ranges.peek().is_none() {
                continue;
            }
            let host_port = address.split(['@', ',']).next()?;
            let node =
                if is("myself") && host_port.starts_with(':') { from.into() } else { named(host_port)? };
            let place = slots.place(node)?;
            for range in ranges {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
                slots.places.get_mut(first.into()..=last.into())?.fill(Some(place));
            }
        }
        (!slots.nodes.is_empty()).then_some(slots)
    }

    pub(crate) fn node(&self, slot: u16) -> Option<&str> {
        let place = (*self.places.get(usize::from(slot))?)?;
        self.nodes.get(usize::from(place)).map(String::as_str)
    }

    pub(crate) fn nodes(&self) -> &[String] {
        &self.nodes
    }

    pub(crate) fn moved(&mut self, slot: u16, node: &str) {
        if let Some(place) = self.place(node.into()) {
            self.places.resize(SLOTS.into(), None);
            if let Some(known) = self.places.get_mut(usize::from(slot)) {
                *known = Some(place);
            }
        }
    }

    fn place(&mut self, node: String) -> Option<u16> {
        let place = self.nodes.iter().position(|known| *known == node).unwrap_or_else(|| {
            self.nodes.push(node);
            self.nodes.len() - 1
        });
        if place >= MOST_NODES {
            self.nodes.truncate(MOST_NODES);
            return None;
        }
        u16::try_from(place).ok()
    }
}

/// Returns a normalised `host:port`. Names are rejected: it is unknown which host a peer means.
fn named(text: &str) -> Option<String> {
    let (host, port) = text.rsplit_once(':')?;
    let host: IpAddr = host.trim_matches(['[', ']']).parse().ok()?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    Some(SocketAddr::new(host, port).to_string())
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Elsewhere {
    Moved { slot: u16, node: String },
    Ask { node: String },
    Later,
}

impl Elsewhere {
    /// Parses the error of a node at `from`. `None` if it is another, or lacks slot or address.
    pub(crate) fn parse(text: &str, from: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let kind = words.next()?;
        if matches!(kind, "TRYAGAIN" | "CLUSTERDOWN" | "LOADING") {
            return Some(Self::Later);
        }
        if !matches!(kind, "MOVED" | "ASK") {
            return None;
        }
        let slot: u16 = words.next()?.parse().ok().filter(|slot| *slot < SLOTS)?;
        let address = words.next()?;
        // A node that does not know its own address leaves it out.
        let node = match address.strip_prefix(':') {
            Some(port) => named(&format!("{}:{port}", from.rsplit_once(':')?.0))?,
            None => named(address)?,
        };
        Some(if kind == "MOVED" { Self::Moved { slot, node } } else { Self::Ask { node } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_slots_of_valkey() {
        // According to `CLUSTER KEYSLOT`.
        for (key, expected) in
            [("", 0), ("123456789", 12739), ("foo", 12182), ("{foo}bar", 12182), ("a{foo}", 12182)]
        {
            assert_eq!(slot(key.as_bytes()), expected, "{key}");
        }
        assert_eq!(slot(b"{}foo"), crc16(b"{}foo") % SLOTS, "an empty tag is none");
        assert_eq!(slot(b"{foo"), crc16(b"{foo") % SLOTS);
        assert_eq!(slot(b"a{b{c}d}"), slot(b"b{c"));
    }

    const NODES: &str = "\
aa :0@0 myself,master - 0 0 1 connected 0-99 16383
bb 192.0.2.2:6380@16380,a.name,shard-id=x master - 0 1 2 connected 100-8000 [200->-cc]
cc [2001:db8::1]:6381@1 master - 0 1 3 connected 8001-16382
dd 192.0.2.4:6382@1 slave bb 0 1 3 connected
ee 192.0.2.5:6383@1 master,fail - 0 1 3 disconnected
";

    #[test]
    fn nodes_are_read() {
        let mut slots = Slots::parse(NODES, "seed:6379").expect("a map");
        for (slot, node) in [
            (0, "seed:6379"),
            (16383, "seed:6379"),
            (100, "192.0.2.2:6380"),
            (200, "192.0.2.2:6380"),
            (9000, "[2001:db8::1]:6381"),
        ] {
            assert_eq!(slots.node(slot), Some(node));
        }
        assert_eq!(slots.nodes().len(), 3);
        slots.moved(200, "192.0.2.9:1");
        assert_eq!((slots.node(200), slots.node(201)), (Some("192.0.2.9:1"), Some("192.0.2.2:6380")));
        assert_eq!((slots.node(16384), Slots::default().node(0)), (None, None));
    }

    #[test]
    fn what_is_no_map_is_refused() {
        let line = |address: &str, range: &str| format!("aa {address} master - 0 0 1 connected {range}\n");
        for text in [
            String::new(),
            "hello".into(),
            line("192.0.2.1:6379@1", ""),
            line("192.0.2.1:6379@1", "0-16384"),
            line("192.0.2.1:6379@1", "7-5"),
            line("192.0.2.1:6379@1", "99999"),
            line("192.0.2.1:6379@1", "x"),
            line("192.0.2.1:0@1", "1"),
            line("192.0.2.1@1", "1"),
            line("a.name:6379@1", "1"),
        ] {
            assert!(Slots::parse(&text, "seed:6379").is_none(), "{text}");
        }
        let many: String = (0..1001).map(|node| line(&format!("192.0.2.1:{}@1", node + 1), "1")).collect();
        assert!(Slots::parse(&many, "seed:6379").is_none(), "more nodes than a cluster has");
        let mut slots = Slots::default();
        (1..=2000).for_each(|port| slots.moved(1, &format!("192.0.2.1:{port}")));
        assert_eq!((slots.nodes().len(), slots.node(1)), (MOST_NODES, Some("192.0.2.1:1000")));
    }

    #[test]
    fn redirections_are_checked() {
        let node = "192.0.2.2:6380".to_string();
        let read = |text| Elsewhere::parse(text, "192.0.2.2:6379");
        assert_eq!(read("MOVED 7 192.0.2.2:6380"), Some(Elsewhere::Moved { slot: 7, node: node.clone() }));
        assert_eq!(read("MOVED 7 :6380"), Some(Elsewhere::Moved { slot: 7, node: node.clone() }));
        assert_eq!(read("ASK 16383 192.0.2.2:6380"), Some(Elsewhere::Ask { node }));
        assert_eq!(read("TRYAGAIN Multiple keys request during rehashing of slot"), Some(Elsewhere::Later));
        for text in
            ["", "MOVED", "MOVED 7", "MOVED 16384 192.0.2.2:1", "MOVED -1 192.0.2.2:1", "MOVED 7 192.0.2.2:0"]
        {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(read("ASK 7 192.0.2.2:99999"), None);
        assert_eq!(read("WRONGTYPE no string"), None);
    }
}
