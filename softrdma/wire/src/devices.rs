//! The devices of a program's machine, as the environment names them.

use std::fmt::Write as _;
use std::net::{AddrParseError, IpAddr};

/// Formats the addresses of each device for [`crate::ADDRESSES`]: those of a device separated by
/// commas, devices by semicolons.
#[must_use]
pub fn format_devices(devices: &[Vec<IpAddr>]) -> String {
    let mut text = String::new();
    for (number, addresses) in devices.iter().enumerate() {
        for (place, address) in addresses.iter().enumerate() {
            let before = match (number, place) {
                (0, 0) => "",
                (_, 0) => ";",
                _ => ",",
            };
            // Writing to a string does not fail.
            let _written = write!(text, "{before}{address}");
        }
    }
    text
}

/// Parses what [`format_devices`] has written.
pub fn parse_devices(text: &str) -> Result<Vec<Vec<IpAddr>>, AddrParseError> {
    text.split(';').map(parse_addresses).collect()
}

/// Parses the addresses of one device, separated by commas.
pub fn parse_addresses(text: &str) -> Result<Vec<IpAddr>, AddrParseError> {
    text.split(',').map(str::parse).collect()
}

/// Returns the GID of an address. An IPv4 address is mapped to IPv6 (RoCEv2, A17.4.5.1).
#[must_use]
pub fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Returns the GUID of a device with these addresses, which its first address makes unique.
#[must_use]
pub fn guid(addresses: &[IpAddr]) -> [u8; 8] {
    let [.., a, b, c, d] = addresses.first().map_or([0; 16], |address| gid(*address));
    [2, 0, 0, 0, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_were_written() {
        let text = "192.0.2.1,2001:db8::1;198.51.100.1";
        let devices = parse_devices(text).expect("addresses");
        assert_eq!(devices.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(format_devices(&devices), text);
        assert!(parse_devices("192.0.2.1;").is_err() && parse_devices("").is_err());
    }
}
