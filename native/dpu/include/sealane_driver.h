/* A driver of an accelerator for sealane-dpu: a shared object that exports sealane_driver().
 *
 * sealane-dpu speaks the card's protocol (docs/formats/card.md) with gateways; the driver seals.
 * All functions are called on one thread, one at a time; only start may take longer than a moment.
 * docs/operate/accelerators.md, "Other cards", says how to write one; drivers/cryptodev.c is one. */

#ifndef SEALANE_DRIVER_H
#define SEALANE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#define SEALANE_DRIVER_VERSION 1

#define SEALANE_KEY_BYTES 32
#define SEALANE_NONCE_BYTES 12
#define SEALANE_TAG_BYTES 16
#define SEALANE_DATA_BYTES 4096
/* Additional data of each job. They end where its data begin. */
#define SEALANE_AAD_BYTES 33
/* What sealane-dpu keeps free before the data, and behind them for the tag. */
#define SEALANE_ROOM_BYTES 64

struct sealane_driver_limits {
    /* Keys that it can hold, 1 to 65535. */
    uint16_t keys;
    /* Jobs in flight, 1 to 65535. */
    uint16_t jobs;
    /* What it drives, for people and for the policy's `product`: 1 to 19 characters of ASCII. */
    char product[20];
};

struct sealane_driver_job {
    /* In an arena that was attached. The ciphertext replaces the plaintext, the tag goes behind. */
    uint8_t *data;
    /* Less than limits.jobs; no two jobs in flight have the same. */
    uint16_t name;
    /* Place of the key. */
    uint16_t key;
    uint8_t nonce[SEALANE_NONCE_BYTES];
};

struct sealane_driver_done {
    uint16_t name;
    /* 1 if it was sealed, 0 if it failed. */
    uint16_t is_sealed;
};

struct sealane_driver {
    uint32_t version; /* SEALANE_DRIVER_VERSION */

    /* Starts the device, with the arguments of the command line. Returns 0, or -1 with one line of
     * text in `error`, ended by a zero. */
    int (*start)(unsigned count, const char *const *arguments, struct sealane_driver_limits *limits,
                 char *error, size_t error_bytes);

    /* Puts a key (AES-256) in a free place, less than limits.keys. Returns 0, or -1 if it can't. */
    int (*load)(uint16_t place, const uint8_t *key);

    /* Forgets a key, and wipes it. No job with it is in flight. */
    void (*unload)(uint16_t place);

    /* Makes memory known in which jobs will lie; it begins and ends at a page. Returns 0 or -1. */
    int (*attach)(uint8_t *arena, size_t bytes);

    /* The memory goes away. No job in it is in flight. */
    void (*detach)(uint8_t *arena, size_t bytes);

    /* Begins sealing with AES-256-GCM. Returns how many of the jobs it took, from the first on. */
    unsigned (*submit)(const struct sealane_driver_job *jobs, unsigned count);

    /* Says which jobs have ended, in any order, `count` at most. Returns how many. */
    unsigned (*poll)(struct sealane_driver_done *done, unsigned count);
};

const struct sealane_driver *sealane_driver(void);

#endif
