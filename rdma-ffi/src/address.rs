//! Addresses, as text and port.

use std::ffi::{CStr, c_char};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};

use crate::error::{Failure, line};

/// Bytes of the text of an address, the closing zero included.
pub const VKRDMA_ADDRESS_TEXT: usize = 64;

/// An address, as text, and a port.
#[repr(C)]
pub struct Address {
    /// The numeric address, closed by a zero: `192.0.2.1`, `2001:db8::1`, `fe80::1%2`.
    pub text: [c_char; VKRDMA_ADDRESS_TEXT],
    /// The port.
    pub port: u16,
}

impl Address {
    pub(crate) fn of(address: SocketAddr) -> Self {
        let text = match address {
            SocketAddr::V6(v6) if v6.scope_id() > 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
            other => other.ip().to_string(),
        };
        Self { text: line(&text), port: address.port() }
    }
}

/// # Safety
/// `text` is null or ends with a zero.
pub(crate) unsafe fn address(text: *const c_char, port: u16) -> Result<SocketAddr, Failure> {
    if text.is_null() {
        return Err(Failure::argument("the address is null"));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().ok().and_then(|text| parse(text, port)).ok_or_else(|| {
        Failure::argument("the address is not a numeric one, as 192.0.2.1, 2001:db8::1 or fe80::1%2")
    })
}

fn parse(text: &str, port: u16) -> Option<SocketAddr> {
    if let Ok(v4) = text.parse::<Ipv4Addr>() {
        return Some((IpAddr::V4(v4), port).into());
    }
    let mut v6: SocketAddrV6 = format!("[{text}]:{port}").parse().ok()?;
    v6.set_port(port);
    Some(v6.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(address: &Address) -> String {
        let bytes = address.text.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0);
        String::from_utf8(bytes.collect()).expect("UTF-8")
    }

    #[test]
    fn a_text_comes_back_as_it_was() {
        for (given, port) in [("192.0.2.1", 0), ("2001:db8::1", 65535), ("fe80::1%2", 6379), ("::", 1)] {
            let parsed = parse(given, port).expect("an address");
            assert_eq!((text(&Address::of(parsed)).as_str(), parsed.port()), (given, port));
        }
        for wrong in ["", "localhost", "1.2.3", "1.2.3.4:5", "::1]:80", "[::1", "::1%eth0"] {
            assert!(parse(wrong, 1).is_none(), "{wrong}");
        }
    }
}
