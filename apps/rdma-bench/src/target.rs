//! The address of a server, and the login of its clients.

use std::fmt;
use std::io::{self, ErrorKind};
use std::num::NonZeroU16;
use std::str::FromStr;
use std::sync::Arc;

use kv_store::command;
use percent_encoding::percent_decode_str;

/// A server: `rdma://`, `tcp://` or `tls://` with `[[USER]:PASSWORD@]HOST:PORT[/DATABASE]`, or
/// `unix:///PATH`.
#[derive(Clone, Debug)]
pub struct Target {
    /// The transport.
    pub carrier: Carrier,
    /// `HOST:PORT`, or the path.
    pub place: String,
    /// The commands that begin each connection.
    pub login: Login,
}

/// A transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// Valkey's protocol over RDMA.
    Rdma,
    /// TCP.
    Tcp,
    /// TLS over TCP.
    Tls,
    /// A Unix socket.
    Unix,
}

impl FromStr for Target {
    // Never repeats the text, which may hold a password.
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORMS: &str = "a target is SCHEME://[[USER]:PASSWORD@]HOST:PORT[/DATABASE], where SCHEME is rdma, tcp or tls, or \
                             unix:///PATH";
        let (scheme, rest) = text.split_once("://").ok_or(FORMS)?;
        let carrier = match scheme {
            "rdma" => Carrier::Rdma,
            "tcp" => Carrier::Tcp,
            "tls" => Carrier::Tls,
            "unix" if !rest.is_empty() => {
                return Ok(Self { carrier: Carrier::Unix, place: rest.into(), login: Login::default() });
            }
            _ => return Err(FORMS),
        };
        let (user, place) = rest.rsplit_once('@').map_or((None, rest), |(user, place)| (Some(user), place));
        let (place, database) = place.split_once('/').unwrap_or((place, ""));
        let port = place.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
        port.and_then(|port| port.parse::<NonZeroU16>().ok()).ok_or(FORMS)?;
        let user = user.map(|user| user.split_once(':').ok_or(FORMS)).transpose()?;
        let database = if database.is_empty() { 0 } else { database.parse().map_err(|_| FORMS)? };
        Ok(Self { carrier, place: place.into(), login: Login::new(user, database) })
    }
}

/// `AUTH` and `SELECT`, if needed. `Debug` prints no password.
#[derive(Clone, Default)]
pub struct Login {
    /// Each command's name and bytes.
    commands: Arc<[(&'static str, Vec<u8>)]>,
    password: Arc<str>,
}

impl Login {
    /// Takes the user and the password percent-encoded, as in a URL. An empty user is the default.
    fn new(user: Option<(&str, &str)>, database: u32) -> Self {
        let (mut commands, mut shown) = (Vec::new(), "".into());
        let mut add = |name: &'static str, arguments: &[&[u8]]| {
            let mut bytes = Vec::new();
            command(&mut bytes, arguments.len(), arguments);
            commands.push((name, bytes));
        };
        if let Some((user, password)) = user {
            let [user, password] = [user, password].map(|text| percent_decode_str(text).collect::<Vec<u8>>());
            match user.is_empty() {
                true => add("AUTH", &[b"AUTH", &password]),
                false => add("AUTH", &[b"AUTH", &user, &password]),
            }
            shown = String::from_utf8_lossy(&password).into();
        }
        if database != 0 {
            add("SELECT", &[b"SELECT", database.to_string().as_bytes()]);
        }
        Self { commands: commands.into(), password: shown }
    }

    /// Sends each command by `ask`, which returns the line of the reply.
    pub(crate) fn say(&self, mut ask: impl FnMut(&[u8]) -> io::Result<Vec<u8>>) -> io::Result<()> {
        self.commands.iter().try_for_each(|(name, bytes)| match ask(bytes) {
            Ok(line) if line == b"+OK" => Ok(()),
            Ok(_) => Err(io::Error::new(ErrorKind::InvalidData, format!("{name}: the reply is none to it"))),
            Err(error) => {
                // A server without the command repeats its arguments.
                let told = error.to_string();
                let told = told.split(", with args").next().unwrap_or_default();
                let password = if self.password.is_empty() { "\0" } else { &self.password };
                Err(io::Error::new(error.kind(), format!("{name}: {}", told.replace(password, "…"))))
            }
        })
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.commands.iter().map(|(name, _)| name)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> (Target, String) {
        let target: Target = text.parse().expect(text);
        let mut said = Vec::new();
        let heard = target.login.say(|bytes| {
            said.extend_from_slice(bytes);
            Ok(b"+OK".into())
        });
        heard.expect("all is well");
        let said = String::from_utf8(said).expect("text").replace("\r\n", " ");
        (target, said)
    }

    #[test]
    fn who_asks_is_told_before_anything_is_asked() {
        for (text, carrier, place, words) in [
            ("tcp://h:1", Carrier::Tcp, "h:1", ""),
            ("rdma://:p%40@h:1", Carrier::Rdma, "h:1", "*2 $4 AUTH $2 p@ "),
            ("tls://ann:p@[::1]:1/2", Carrier::Tls, "[::1]:1", "*3 $4 AUTH $3 ann $1 p *2 $6 SELECT $1 2 "),
            ("unix:///a@b", Carrier::Unix, "/a@b", ""),
        ] {
            let (target, said) = said(text);
            assert_eq!((target.carrier, &*target.place, &*said), (carrier, place, words), "{text}");
        }
    }

    #[test]
    fn no_password_is_printed() {
        let target: Target = "tcp://ann:s3cret@h:1".parse().expect("a target");
        for text in [
            "the server replied \"WRONGPASS s3cret\"",
            "ERR unknown command, with args beginning with: 's3cret'",
        ] {
            let refused = target.login.say(|_| Err(io::Error::other(text)));
            let told = format!("{target:?} {}", refused.expect_err("refused"));
            assert!(told.contains("AUTH: ") && !told.contains("s3cret"), "{told}");
        }
    }
}
