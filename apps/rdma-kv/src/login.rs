//! The commands that log in a connection.

use std::fmt;

use crate::client::command;

/// User, password and database for [`Client::log_in`](crate::Client::log_in). Start from
/// [`Login::default`]: the server's default user without a password, and database 0.
///
/// `Debug` prints no password. RDMA and TCP do not encrypt it on its way to the server.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    user: Option<Vec<u8>>,
    password: Option<Vec<u8>>,
    database: u32,
}

impl Login {
    /// Sets the password of the default user (`requirepass`).
    #[must_use]
    pub fn password(self, password: impl Into<Vec<u8>>) -> Self {
        Self { user: None, password: Some(password.into()), ..self }
    }

    /// Sets a user of the server's access control list, and the password of that user.
    #[must_use]
    pub fn user(self, user: impl Into<Vec<u8>>, password: impl Into<Vec<u8>>) -> Self {
        Self { user: Some(user.into()), password: Some(password.into()), ..self }
    }

    /// Sets the number of the keys' database.
    #[must_use]
    pub fn database(self, database: u32) -> Self {
        Self { database, ..self }
    }

    /// Returns a server's words without the password, which it may have repeated.
    pub(crate) fn without_password(&self, words: &str) -> String {
        let password = self.password.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
        match password.is_empty() {
            true => words.into(),
            false => words.replace(&*password, "…"),
        }
    }

    pub(crate) fn commands(&self) -> (Vec<u8>, Vec<&'static str>) {
        let (mut bytes, mut names) = (Vec::new(), Vec::new());
        let mut add = |name: &'static str, arguments: &[&[u8]]| {
            command(&mut bytes, arguments.len(), arguments);
            names.push(name);
        };
        match (&self.user, &self.password) {
            (Some(user), Some(password)) => add("AUTH", &[b"AUTH", user, password]),
            (None, Some(password)) => add("AUTH", &[b"AUTH", password]),
            (_, None) => {}
        }
        if self.database != 0 {
            add("SELECT", &[b"SELECT", self.database.to_string().as_bytes()]);
        }
        (bytes, names)
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("user", &self.user.as_deref().map(String::from_utf8_lossy))
            .field("password", &self.password.as_ref().map(|_| format_args!("…")))
            .field("database", &self.database)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_unasked() {
        assert_eq!(Login::default().commands(), (Vec::new(), Vec::new()));
        assert_eq!(Login::default().password("").commands().1, ["AUTH"], "an empty password is one");
    }

    #[test]
    fn no_password_is_printed() {
        let login = Login::default().user("ann", "s3cret").database(2);
        let text = format!("{login:?} {login:#?}");
        assert!(text.contains("ann") && text.contains("database: 2"), "{text}");
        assert!(!text.contains("s3cret") && !format!("{:?}", login.password("s3cret")).contains("s3cret"));
    }
}
