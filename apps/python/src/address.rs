//! Addresses of servers.
//!
//! The form is
//! `SCHEME[+cluster]://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][/DATABASE][?NAME=VALUE[&…]]`.

use percent_encoding::percent_decode_str;
use rdma_conn::{Options, Setting};
use rdma_kv::Login;

use crate::server::Refusal;

/// The forms of an address, for messages.
pub(crate) const FORMS: &str = "valkey://HOST[:PORT], rdma://HOST[:PORT], tcp://HOST[:PORT] or embedded://NAME; of a cluster \
                                valkey+cluster://HOST[:PORT],…, or rdma+cluster or tcp+cluster; before the host may stand \
                                [USER]:PASSWORD@, in which %XX is a byte, and behind all of it /DATABASE and ?NAME=VALUE, options \
                                joined by &";

pub(crate) struct Address {
    pub(crate) scheme: String,
    /// One host, or some nodes of a cluster. Each may have a port.
    pub(crate) hosts: Vec<String>,
    pub(crate) cluster: bool,
    pub(crate) login: Login,
    /// Of RDMA connections.
    pub(crate) options: Options,
    /// The address without the user and the password, for messages.
    pub(crate) shown: String,
}

impl Address {
    pub(crate) fn parse(url: &str) -> Result<Self, Refusal> {
        // A password may precede the last @, so messages show only what follows it.
        let (before, behind) = match url.rsplit_once('@') {
            Some((before, behind)) => (before, Some(behind)),
            None => (url, None),
        };
        let wrong = || format!("{}: an address is {FORMS}", behind.unwrap_or(before));
        let (scheme, rest) = before.split_once("://").ok_or_else(wrong)?;
        let place = behind.unwrap_or(rest);
        let (place, query) = place.split_once('?').unwrap_or((place, ""));
        let (host, database) = place.split_once('/').unwrap_or((place, ""));
        let hosts: Vec<String> = host.split(',').map(Into::into).collect();
        let shown = format!("{scheme}://{place}");
        let (scheme, cluster) =
            scheme.strip_suffix("+cluster").map_or((scheme, false), |scheme| (scheme, true));
        if hosts.iter().any(String::is_empty) || place.contains('#') || (hosts.len() > 1 && !cluster) {
            return Err(wrong().into());
        }
        let mut login = Login::default();
        if behind.is_some() {
            let (user, password) = rest.split_once(':').ok_or_else(wrong)?;
            let [user, password] = [user, password].map(|text| percent_decode_str(text).collect::<Vec<u8>>());
            login = if user.is_empty() { login.password(password) } else { login.user(user, password) };
        }
        if !database.is_empty() {
            login = login.database(database.parse().map_err(|_| wrong())?);
        }
        let mut options = rdma_kv::options();
        for (index, text) in query.split('&').filter(|text| !text.is_empty()).enumerate() {
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            // An unknown option may be a password.
            let unknown = || format!("{shown}: option {} is none of {}", index + 1, Setting::list());
            Setting::named(name).ok_or_else(unknown)?.set(&mut options, value)?;
        }
        Ok(Self { scheme: scheme.into(), hosts, cluster, login, options, shown })
    }
}
