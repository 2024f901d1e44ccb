//! The stored entries, generated from numbers: every byte can be checked without keeping it.

/// A key and the length of its value.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its number, which determines everything else.
    pub number: u64,
    /// Length of the value in bytes.
    pub value_len: usize,
}

impl Entry {
    /// Returns the key.
    pub fn key(&self) -> String {
        format!("conformance:{:06}", self.number)
    }

    /// Returns the value: a pseudo-random stream, in which a wrong key or offset shows.
    pub fn value(&self) -> Vec<u8> {
        let mut state = self.number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut value = Vec::with_capacity(self.value_len + 8);
        while value.len() < self.value_len {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            value.extend_from_slice(&state.to_le_bytes());
        }
        value.truncate(self.value_len);
        value
    }

    /// Describes the first difference of `found` from the value, if there is one.
    pub fn difference(&self, found: &[u8]) -> Option<String> {
        let expected = self.value();
        if found.len() != expected.len() {
            return Some(format!("{}: {} bytes came back of {}", self.key(), found.len(), expected.len()));
        }
        let at = expected.iter().zip(found).position(|(expected, found)| expected != found)?;
        Some(format!("{}: byte {at} of {} differs", self.key(), expected.len()))
    }
}

/// Returns `keys` entries: the boundary lengths of a window first, then practical lengths.
pub fn entries(keys: u64, window: usize) -> Vec<Entry> {
    let boundaries = boundaries(window);
    (0..keys)
        .map(|number| {
            let usual =
                [0, 1, 2, 3, 7, 8, 15, 64, 100, 511, 512, 1000, 1024, 4095, 4096, 16_384, 20_474, 65_536];
            let value_len = match boundaries.get(number as usize) {
                Some(boundary) => *boundary,
                // Large ones are rare, so that a run takes seconds.
                None if number % 16 < 14 => usual[(number % 14) as usize],
                None => usual[(14 + number / 16 % 4) as usize],
            };
            Entry { number, value_len }
        })
        .collect()
}

/// Returns lengths at which something could go wrong: of the value, the request and the reply.
fn boundaries(window: usize) -> Vec<usize> {
    let around = |length: usize| [length - 1, length, length + 1];
    let mut lengths = vec![0, 1, 2];
    for windows in [1, 2, 3, 16] {
        let full = windows * window;
        lengths.extend(around(full));
        // `$LEN\r\n` before a reply's value, `\r\n` after it; a request has command and key too.
        let reply = full - full.to_string().len() - 5;
        let request = reply - "*3\r\n$3\r\nSET\r\n$18\r\nconformance:000000\r\n".len();
        lengths.extend(around(reply));
        lengths.extend(around(request));
    }
    lengths.retain(|length| *length <= 16 * window);
    lengths
}
