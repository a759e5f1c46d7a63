//! Reservations of one namespace (NVMe Base 2.0 §8.19): registered hosts, the reservation held, and
//! which commands it permits. A pure state machine; hosts are identified by their 128-bit
//! identifier.
//!
//! Nothing persists through power loss, and this is reported (PTPLS = 0).

use std::collections::BTreeMap;

use sealane_proto::nvme::operation::{AcquireAction, Persistence, RegisterAction, ReservationType};

/// Host identifier, as given in Connect.
pub type HostId = [u8; 16];

/// Maximum hosts registered with a namespace.
pub const REGISTRANTS_MAX: usize = 64;

/// Controller id reported for a registrant, as controllers are dynamic.
const DYNAMIC_CONTROLLER: u16 = 0xffff;

/// Command groups of the NVM command set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Read, compare, verify.
    Read,
    /// Write, write zeroes, dataset management, flush, and compare-and-write.
    Write,
}

/// Why a reservation command is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Reservation Conflict.
    Conflict,
    /// Invalid Field in Command.
    InvalidField,
    /// Host Identifier Inconsistent Format.
    HostIdFormat,
    /// [`REGISTRANTS_MAX`] hosts are registered.
    Full,
}

/// Notice to a host about an action of another host (reservation notification log page).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// Its registration was removed.
    RegistrationPreempted,
    /// The reservation was released.
    ReservationReleased,
    /// The reservation was cleared.
    ReservationPreempted,
}

impl Notice {
    /// Stable reason id.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::RegistrationPreempted => "reservation.registration_preempted",
            Self::ReservationReleased => "reservation.released",
            Self::ReservationPreempted => "reservation.preempted",
        }
    }
}

/// Reservation Register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register {
    /// RREGA.
    pub action: RegisterAction,
    /// IEKEY: the current key isn't checked.
    pub ignore_key: bool,
    /// CPTPL.
    pub persistence: Persistence,
    /// CRKEY.
    pub current_key: u64,
    /// NRKEY.
    pub new_key: u64,
}

/// Reservation Acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acquire {
    /// RACQA.
    pub action: AcquireAction,
    /// RTYPE.
    pub kind: ReservationType,
    /// CRKEY.
    pub current_key: u64,
    /// PRKEY.
    pub preempt_key: u64,
}

/// Hosts to notify, each with its notice.
pub type Notices = Vec<(HostId, Notice)>;

fn is_held_by_all(kind: ReservationType) -> bool {
    use ReservationType as T;
    matches!(kind, T::WriteExclusiveAllRegistrants | T::ExclusiveAccessAllRegistrants)
}

/// Whether all registrants have the holder's access.
fn admits_registrants(kind: ReservationType) -> bool {
    !matches!(kind, ReservationType::WriteExclusive | ReservationType::ExclusiveAccess)
}

/// Whether all hosts may read.
fn admits_readers(kind: ReservationType) -> bool {
    use ReservationType as T;
    matches!(
        kind,
        T::WriteExclusive | T::WriteExclusiveRegistrants | T::WriteExclusiveAllRegistrants
    )
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    kind: ReservationType,
    /// `None` while all registrants hold it.
    holder: Option<HostId>,
}

/// Registrants and reservation of a namespace.
#[derive(Debug, Default)]
pub struct Reservations {
    registrants: BTreeMap<HostId, u64>,
    held: Option<Held>,
    generation: u32,
}

impl Reservations {
    // Commands.

    /// Reservation Register.
    pub fn register(&mut self, host: HostId, command: Register) -> Result<Notices, Refusal> {
        // Preempt would take a key of zero for "all registrants".
        let removes = command.action == RegisterAction::Unregister;
        if command.persistence == Persistence::Set || (!removes && command.new_key == 0) {
            return Err(Refusal::InvalidField);
        }
        let key = self.registrants.get(&host).copied();
        let authentic = key.is_some_and(|key| command.ignore_key || key == command.current_key);
        let mut notices = Notices::new();
        match command.action {
            RegisterAction::Register => match key {
                Some(key) if key == command.new_key => {}
                Some(_) => return Err(Refusal::Conflict),
                None if self.registrants.len() >= REGISTRANTS_MAX => return Err(Refusal::Full),
                None => _ = self.registrants.insert(host, command.new_key),
            },
            RegisterAction::Unregister | RegisterAction::Replace if !authentic => {
                return Err(Refusal::Conflict);
            }
            RegisterAction::Unregister => notices = self.unregister(host),
            RegisterAction::Replace => _ = self.registrants.insert(host, command.new_key),
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(notices)
    }

    /// Reservation Acquire. For "preempt and abort" the caller must make sure that no command is
    /// running.
    pub fn acquire(&mut self, host: HostId, command: Acquire) -> Result<Notices, Refusal> {
        let Acquire { action, kind, current_key, preempt_key } = command;
        self.authenticate(host, current_key)?;
        if action != AcquireAction::Acquire {
            return self.preempt(host, kind, preempt_key);
        }
        match self.held {
            None => self.held = Some(Self::hold(host, kind)),
            Some(held) if held.kind == kind && self.holds(host) => {}
            Some(_) => return Err(Refusal::Conflict),
        }
        Ok(Notices::new())
    }

    /// Reservation Release of a reservation of this type, or (`None`) Clear.
    pub fn release(
        &mut self,
        host: HostId,
        kind: Option<ReservationType>,
        current_key: u64,
    ) -> Result<Notices, Refusal> {
        self.authenticate(host, current_key)?;
        let Some(kind) = kind else {
            self.generation = self.generation.wrapping_add(1);
            let notices = self.notices(host, Notice::ReservationPreempted);
            self.registrants.clear();
            self.held = None;
            return Ok(notices);
        };
        match self.held {
            Some(held) if self.holds(host) && held.kind == kind => Ok(self.free(host, held)),
            Some(_) if self.holds(host) => Err(Refusal::InvalidField),
            _ => Ok(Notices::new()),
        }
    }

    // Questions.

    /// Whether commands of `host` in this group are permitted.
    #[must_use]
    pub fn allows(&self, host: HostId, group: Group) -> bool {
        let Some(held) = self.held else { return true };
        self.holds(host)
            || (admits_registrants(held.kind) && self.registrants.contains_key(&host))
            || (group == Group::Read && admits_readers(held.kind))
    }

    /// Whether [`Self::allows`] can return false.
    #[must_use]
    pub fn is_reserved(&self) -> bool {
        self.held.is_some()
    }

    /// The reservation's type and holder; the holder is `None` if all registrants hold it.
    #[must_use]
    pub fn held(&self) -> Option<(ReservationType, Option<HostId>)> {
        self.held.map(|held| (held.kind, held.holder))
    }

    /// Counter of registrations, preemptions and clears.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Registered hosts with their keys, and whether they hold the reservation.
    pub fn registrants(&self) -> impl Iterator<Item = (HostId, u64, bool)> {
        self.registrants.iter().map(|(host, key)| (*host, *key, self.holds(*host)))
    }

    /// The status data structure of Reservation Report, truncated or padded to `bytes`. Only the
    /// extended form has room for the 128-bit host identifiers used on fabrics.
    pub fn report(&self, extended: bool, bytes: usize) -> Result<Vec<u8>, Refusal> {
        if !extended {
            return Err(Refusal::HostIdFormat);
        }
        let mut data = vec![0; 64];
        data[..4].copy_from_slice(&self.generation.to_le_bytes());
        data[4] = self.held.map_or(0, |held| held.kind as u8);
        data[5..7].copy_from_slice(&(self.registrants.len() as u16).to_le_bytes());
        for (host, key, holds) in self.registrants() {
            data.extend_from_slice(&DYNAMIC_CONTROLLER.to_le_bytes());
            data.extend_from_slice(&[u8::from(holds), 0, 0, 0, 0, 0]);
            data.extend_from_slice(&key.to_le_bytes());
            data.extend_from_slice(&host);
            data.extend_from_slice(&[0; 32]);
        }
        data.resize(bytes, 0);
        Ok(data)
    }

    fn authenticate(&self, host: HostId, key: u64) -> Result<(), Refusal> {
        let known = self.registrants.get(&host) == Some(&key);
        known.then_some(()).ok_or(Refusal::Conflict)
    }

    fn holds(&self, host: HostId) -> bool {
        self.held.is_some_and(|held| match held.holder {
            Some(holder) => holder == host,
            None => self.registrants.contains_key(&host),
        })
    }

    fn hold(host: HostId, kind: ReservationType) -> Held {
        Held { kind, holder: (!is_held_by_all(kind)).then_some(host) }
    }

    /// A notice for every registrant but the host that caused it.
    fn notices(&self, cause: HostId, notice: Notice) -> Notices {
        let others = self.registrants.keys().filter(|host| **host != cause);
        others.map(|host| (*host, notice)).collect()
    }

    fn unregister(&mut self, host: HostId) -> Notices {
        let held = self.held.filter(|held| match held.holder {
            Some(holder) => holder == host,
            None => self.registrants.len() == 1,
        });
        self.registrants.remove(&host);
        held.map(|held| self.free(host, held)).unwrap_or_default()
    }

    /// Ends the reservation; notifies registrants that it admitted.
    fn free(&mut self, host: HostId, held: Held) -> Notices {
        self.held = None;
        if admits_registrants(held.kind) {
            self.notices(host, Notice::ReservationReleased)
        } else {
            Notices::new()
        }
    }

    fn preempt(
        &mut self,
        host: HostId,
        kind: ReservationType,
        key: u64,
    ) -> Result<Notices, Refusal> {
        let takes_over = match self.held {
            Some(Held { holder: Some(holder), .. }) => self.registrants.get(&holder) == Some(&key),
            Some(Held { holder: None, .. }) => key == 0,
            None => false,
        };
        if key == 0 && !takes_over {
            return Err(Refusal::InvalidField);
        }
        let gone: Vec<HostId> = self
            .registrants
            .iter()
            .filter(|(_, registered)| key == 0 || **registered == key)
            .map(|(registrant, _)| *registrant)
            .filter(|registrant| !takes_over || *registrant != host)
            .collect();
        if gone.is_empty() && !takes_over {
            return Err(Refusal::Conflict);
        }
        let mut notices = Notices::new();
        for registrant in gone {
            self.registrants.remove(&registrant);
            if registrant != host {
                notices.push((registrant, Notice::RegistrationPreempted));
            }
        }
        if takes_over {
            let before = self.held.replace(Self::hold(host, kind));
            if before.is_some_and(|held| admits_registrants(held.kind) && held.kind != kind) {
                notices.extend(self.notices(host, Notice::ReservationReleased));
            }
        } else if self.registrants.is_empty() {
            self.held = None;
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(notices)
    }
}

#[cfg(test)]
#[path = "reservation_tests.rs"]
mod tests;
