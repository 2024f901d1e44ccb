//! Options by name, for command lines, URLs and files of settings. Each is described here once.

use crate::error::Error;
use crate::options::Options;

/// An option of a connection that a network or a card may want, with its form as text.
///
/// `--traffic-class 104` of programs, `?traffic_class=104` of URLs, `vkrdma_options_set` of the C
/// interface and arguments of the module are made from this.
#[derive(Debug)]
#[non_exhaustive]
pub struct Setting {
    /// The name of the field of [`Options`].
    pub name: &'static str,
    /// The values that it takes, in short: `0..255` or `yes|no`.
    pub values: &'static str,
    /// A sentence or two for users.
    pub help: &'static str,
    set: fn(&mut Options, &str) -> Option<()>,
}

/// All settings, in the order in which a program lists them.
pub static SETTINGS: [Setting; 4] = [
    Setting {
        name: "traffic_class",
        values: "0..255",
        help: "Traffic class of the packets of RDMA connections that are dialled: DSCP times 4. By default the system's. Packets \
               of a connection that is accepted have the class of its client",
        set: |options, value| value.parse().ok().map(|code| options.traffic_class = Some(code)),
    },
    Setting {
        name: "ack_timeout",
        values: "0..31",
        help: "How long an RDMA device waits for an acknowledgement before it sends again: 4.096 µs times 2 to the power of \
               this, for ever if it is 0. By default what the connection manager finds right for the route",
        set: |options, value| value.parse().ok().map(|code| options.ack_timeout = Some(code)),
    },
    Setting {
        name: "relaxed_ordering",
        values: "yes|no",
        help: "Let the device write received bytes in any order. Some machines are faster so, others slower",
        set: |options, value| yes_or_no(value).map(|on| options.relaxed_ordering = on),
    },
    Setting {
        name: "huge_pages",
        values: "yes|no",
        help: "Put windows and send buffers of 2 MiB and more on huge pages, if there are any",
        set: |options, value| yes_or_no(value).map(|on| options.huge_pages = on),
    },
];

impl Setting {
    /// Returns the setting of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        SETTINGS.iter().find(|setting| setting.name == name)
    }

    /// Returns all settings with their values, `traffic_class=0..255, …`, for the text of an error.
    pub fn list() -> String {
        SETTINGS.each_ref().map(|setting| format!("{}={}", setting.name, setting.values)).join(", ")
    }

    /// Returns whether it is on or off, so that its name alone can mean `yes`.
    pub fn is_switch(&self) -> bool {
        self.values == "yes|no"
    }

    /// Sets the option to `value`.
    ///
    /// # Errors
    /// Returns [`Error::Options`], and changes nothing, if it does not take this value.
    pub fn set(&self, options: &mut Options, value: &str) -> Result<(), Error> {
        let mut changed = *options;
        let invalid = Error::Options { field: self.name, bounds: self.values };
        (self.set)(&mut changed, value).ok_or(invalid.clone())?;
        changed.check().map_err(|_| invalid)?;
        *options = changed;
        Ok(())
    }
}

fn yes_or_no(text: &str) -> Option<bool> {
    match text {
        "yes" => Some(true),
        "no" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_takes_its_values_and_no_others() {
        let mut options = Options::default();
        let valid = [
            ("traffic_class", "255"),
            ("ack_timeout", "31"),
            ("relaxed_ordering", "yes"),
            ("huge_pages", "yes"),
        ];
        assert_eq!(valid.map(|(name, _)| name), SETTINGS.each_ref().map(|setting| setting.name));
        for (setting, (_, value)) in SETTINGS.iter().zip(valid) {
            setting.set(&mut options, value).expect(setting.name);
        }
        let expected = Options::default().traffic_class(Some(255)).ack_timeout(Some(31));
        let expected = expected.relaxed_ordering(true).huge_pages(true);
        assert_eq!(options, expected);
        for (name, value) in
            [("traffic_class", "256"), ("ack_timeout", "32"), ("ack_timeout", "-1"), ("huge_pages", "")]
        {
            let error = Setting::named(name).expect(name).set(&mut options, value).expect_err(value);
            assert!(error.to_string().contains(name), "{error}");
        }
        assert_eq!(options, expected);
        assert!(Setting::named("spin").is_none());
    }
}
