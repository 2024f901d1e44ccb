//! Bytes as text, in recordings and in test vectors.

use std::fmt;

use serde::{Deserialize, Serialize};

const SHOWN: usize = 32;

/// Returns the first bytes as pairs of digits, for people.
#[must_use]
pub fn start(bytes: &[u8]) -> String {
    let digits: Vec<_> = bytes.iter().take(SHOWN).map(|byte| format!("{byte:02x}")).collect();
    format!("{}{}", digits.join(" "), if bytes.len() > SHOWN { " …" } else { "" })
}

/// Bytes written as hexadecimal digits.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub Vec<u8>);

impl TryFrom<String> for Bytes {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let pairs = text.as_bytes().chunks(2);
        let byte = |pair: &[u8]| {
            let digits = str::from_utf8(pair).ok().filter(|digits| digits.len() == 2)?;
            u8::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))
        };
        let bytes: Option<Vec<u8>> = pairs.map(byte).collect();
        bytes.map(Self).ok_or_else(|| format!("{text} is not pairs of hexadecimal digits"))
    }
}

impl From<Bytes> for String {
    fn from(Bytes(bytes): Bytes) -> Self {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from(self.clone()))
    }
}
