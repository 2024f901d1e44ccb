//! The vectors of `spec/snapshot.toml`.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::path::Path;

use serde::Deserialize;

#[derive(Deserialize)]
pub(crate) struct Spec {
    pub(crate) vector: Vec<Vector>,
}

#[derive(Deserialize)]
pub(crate) struct Vector {
    pub(crate) name: String,
    /// Hexadecimal digits, with spaces.
    frame: String,
    /// The name of its kind, if it is a frame.
    pub(crate) kind: Option<String>,
    /// The reason for which it is no frame.
    pub(crate) error: Option<String>,
    /// Whether its encoding differs from these bytes.
    #[serde(default)]
    pub(crate) unlike: bool,
}

impl Vector {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        bytes(&self.frame)
    }
}

/// Bytes of hexadecimal digits, with spaces.
pub(crate) fn bytes(digits: &str) -> Vec<u8> {
    let digits: String = digits.split_whitespace().collect();
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("two digits");
    (0..digits.len()).step_by(2).map(byte).collect()
}

pub(crate) fn read() -> Spec {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("spec/snapshot.toml");
    let text = std::fs::read_to_string(path).expect("the requirements");
    toml::from_str(&text).expect("a table of requirements")
}
