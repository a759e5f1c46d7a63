/* DPDK's crypto devices as a driver of sealane-dpu: software (crypto_aesni_gcm, crypto_openssl,
 * crypto_scheduler) and, with the same calls, cards whose poll mode driver has AES-GCM.
 *
 * Arguments: device=NAME where there are several devices, everything else goes to DPDK's EAL.
 * Tried with DPDK 22.11. Sources: DPDK programmer's guide, "Cryptography Device Library". */

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <rte_cryptodev.h>
#include <rte_dev.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_mbuf.h>
#include <rte_memory.h>

#include "sealane_driver.h"

#define KEYS 128
#define JOBS 1024
#define BURST 32
#define EAL_ARGUMENTS 64
#define POOL_CACHE 64

/* Behind each operation. */
struct job {
    uint8_t nonce[SEALANE_NONCE_BYTES];
    uint16_t name;
};

#define NONCE_OFFSET (sizeof(struct rte_crypto_op) + sizeof(struct rte_crypto_sym_op))

static uint8_t device;
static struct rte_mempool *operations, *buffers, *session_pool;
static void *sessions[KEYS];

/* Each buffer points into an arena, which is not DPDK's to free. */
static void keep(void *address, void *opaque) { (void)address, (void)opaque; }
static struct rte_mbuf_ext_shared_info shared = {.free_cb = keep};

static int failed(char *error, size_t bytes, const char *what, int number) {
    snprintf(error, bytes, "%s: %s", what, rte_strerror(number < 0 ? -number : number));
    return -1;
}

static int find_device(const char *name, char *error, size_t bytes) {
    unsigned count = rte_cryptodev_count();
    if (name == NULL) {
        if (count == 1) {
            for (device = 0; !rte_cryptodev_is_valid_dev(device); device++)
                ;
            return 0;
        }
        snprintf(error, bytes, count == 0 ? "no crypto device: add one with --vdev=NAME or -a ADDRESS"
                                          : "several crypto devices: choose one with device=NAME");
        return -1;
    }
    int found = rte_cryptodev_get_dev_id(name);
    if (found < 0) {
        snprintf(error, bytes, "no crypto device is named %s", name);
        return -1;
    }
    device = (uint8_t)found;
    return 0;
}

/* NULL: it is software. */
static struct rte_device *hardware(void) {
    struct rte_cryptodev_info info;
    rte_cryptodev_info_get(device, &info);
    return info.feature_flags & RTE_CRYPTODEV_FF_HW_ACCELERATED ? info.device : NULL;
}

static int check_capability(char *error, size_t bytes) {
    struct rte_cryptodev_sym_capability_idx index = {
        .type = RTE_CRYPTO_SYM_XFORM_AEAD,
        .algo.aead = RTE_CRYPTO_AEAD_AES_GCM,
    };
    const struct rte_cryptodev_symmetric_capability *capability =
        rte_cryptodev_sym_capability_get(device, &index);
    if (capability != NULL &&
        rte_cryptodev_sym_capability_check_aead(capability, SEALANE_KEY_BYTES, SEALANE_TAG_BYTES,
                                                SEALANE_AAD_BYTES, SEALANE_NONCE_BYTES) == 0)
        return 0;
    snprintf(error, bytes, "%s has no AES-256-GCM with 12-byte nonces, %d bytes of additional data",
             rte_cryptodev_name_get(device), SEALANE_AAD_BYTES);
    return -1;
}

static int start(unsigned count, const char *const *arguments, struct sealane_driver_limits *limits,
                 char *error, size_t bytes) {
    char *eal[EAL_ARGUMENTS] = {"sealane-dpu", "--no-shconf", "--no-telemetry"};
    int eal_count = 3;
    const char *name = NULL;
    for (unsigned index = 0; index < count; index++) {
        if (strncmp(arguments[index], "device=", 7) == 0)
            name = arguments[index] + 7;
        else if (eal_count == EAL_ARGUMENTS)
            return failed(error, bytes, "too many arguments", E2BIG);
        else
            eal[eal_count++] = (char *)(uintptr_t)arguments[index];
    }
    if (rte_eal_init(eal_count, eal) < 0)
        return failed(error, bytes, "DPDK's EAL (without huge pages: --no-huge)", rte_errno);
    if (find_device(name, error, bytes) != 0 || check_capability(error, bytes) != 0)
        return -1;
    /* Addresses are given as the process has them: with another mode a card would write elsewhere. */
    if (hardware() != NULL && rte_eal_iova_mode() != RTE_IOVA_VA) {
        snprintf(error, bytes, "%s needs --iova-mode=va, and an IOMMU",
                 rte_cryptodev_name_get(device));
        return -1;
    }
    struct rte_cryptodev_info info;
    rte_cryptodev_info_get(device, &info);
    int socket = rte_cryptodev_socket_id(device);
    operations = rte_crypto_op_pool_create("operations", RTE_CRYPTO_OP_TYPE_SYMMETRIC, 2 * JOBS,
                                           POOL_CACHE, sizeof(struct job), socket);
    buffers = rte_pktmbuf_pool_create("buffers", 2 * JOBS, POOL_CACHE, 0, RTE_PKTMBUF_HEADROOM, socket);
    session_pool = rte_cryptodev_sym_session_pool_create(
        "sessions", 2 * KEYS, rte_cryptodev_sym_get_private_session_size(device), 0, 0, socket);
    if (operations == NULL || buffers == NULL || session_pool == NULL)
        return failed(error, bytes, "DPDK's memory (-m MiB)", rte_errno);
    struct rte_cryptodev_config config = {.socket_id = socket, .nb_queue_pairs = 1};
    struct rte_cryptodev_qp_conf pair = {.nb_descriptors = 2 * JOBS, .mp_session = session_pool};
    int status = rte_cryptodev_configure(device, &config);
    if (status == 0)
        status = rte_cryptodev_queue_pair_setup(device, 0, &pair, socket);
    if (status == 0)
        status = rte_cryptodev_start(device);
    if (status != 0)
        return failed(error, bytes, rte_cryptodev_name_get(device), status);
    rte_mbuf_ext_refcnt_set(&shared, 1);
    uint32_t places = info.sym.max_nb_sessions;
    limits->keys = places == 0 || places > KEYS ? KEYS : (uint16_t)places;
    limits->jobs = JOBS;
    snprintf(limits->product, sizeof limits->product, "%s", info.driver_name);
    return 0;
}

static int load(uint16_t place, const uint8_t *key) {
    struct rte_crypto_sym_xform transform = {
        .type = RTE_CRYPTO_SYM_XFORM_AEAD,
        .aead = {
            .op = RTE_CRYPTO_AEAD_OP_ENCRYPT,
            .algo = RTE_CRYPTO_AEAD_AES_GCM,
            .key = {.data = key, .length = SEALANE_KEY_BYTES},
            .iv = {.offset = NONCE_OFFSET, .length = SEALANE_NONCE_BYTES},
            .digest_length = SEALANE_TAG_BYTES,
            .aad_length = SEALANE_AAD_BYTES,
        },
    };
    sessions[place] = rte_cryptodev_sym_session_create(device, &transform, session_pool);
    return sessions[place] == NULL ? -1 : 0;
}

/* DPDK wipes a session's memory as it frees it. */
static void unload(uint16_t place) {
    rte_cryptodev_sym_session_free(device, sessions[place]);
    sessions[place] = NULL;
}

/* A device of software reads any memory. DPDK registers memory of 127 queues at most for a card. */
static int attach(uint8_t *arena, size_t bytes) {
    struct rte_device *card = hardware();
    if (card == NULL)
        return 0;
    if (rte_extmem_register(arena, bytes, NULL, 0, (size_t)sysconf(_SC_PAGESIZE)) != 0)
        return -1;
    if (rte_dev_dma_map(card, arena, (uintptr_t)arena, bytes) == 0)
        return 0;
    rte_extmem_unregister(arena, bytes);
    return -1;
}

static void detach(uint8_t *arena, size_t bytes) {
    struct rte_device *card = hardware();
    if (card == NULL)
        return;
    rte_dev_dma_unmap(card, arena, (uintptr_t)arena, bytes);
    rte_extmem_unregister(arena, bytes);
}

static void release(struct rte_crypto_op *operation) {
    rte_pktmbuf_free(operation->sym->m_src);
    rte_crypto_op_free(operation);
}

static struct rte_crypto_op *prepare(const struct sealane_driver_job *job) {
    struct rte_crypto_op *operation = rte_crypto_op_alloc(operations, RTE_CRYPTO_OP_TYPE_SYMMETRIC);
    struct rte_mbuf *buffer = rte_pktmbuf_alloc(buffers);
    if (operation == NULL || buffer == NULL) {
        rte_crypto_op_free(operation);
        rte_pktmbuf_free(buffer);
        return NULL;
    }
    struct job *own = rte_crypto_op_ctod_offset(operation, struct job *, NONCE_OFFSET);
    memcpy(own->nonce, job->nonce, sizeof own->nonce);
    own->name = job->name;
    uint8_t *start = job->data - SEALANE_ROOM_BYTES;
    rte_mbuf_ext_refcnt_update(&shared, 1);
    rte_pktmbuf_attach_extbuf(buffer, start, (uintptr_t)start,
                              SEALANE_ROOM_BYTES + SEALANE_DATA_BYTES + SEALANE_ROOM_BYTES, &shared);
    buffer->data_off = SEALANE_ROOM_BYTES;
    buffer->data_len = SEALANE_DATA_BYTES;
    buffer->pkt_len = SEALANE_DATA_BYTES;
    rte_crypto_op_attach_sym_session(operation, sessions[job->key]);
    struct rte_crypto_sym_op *sym = operation->sym;
    sym->m_src = buffer;
    sym->m_dst = NULL;
    sym->aead.data.offset = 0;
    sym->aead.data.length = SEALANE_DATA_BYTES;
    sym->aead.digest.data = job->data + SEALANE_DATA_BYTES;
    sym->aead.digest.phys_addr = (uintptr_t)sym->aead.digest.data;
    sym->aead.aad.data = job->data - SEALANE_AAD_BYTES;
    sym->aead.aad.phys_addr = (uintptr_t)sym->aead.aad.data;
    return operation;
}

static unsigned submit(const struct sealane_driver_job *jobs, unsigned count) {
    unsigned taken = 0;
    while (taken < count) {
        struct rte_crypto_op *burst[BURST];
        uint16_t ready = 0;
        while (ready < BURST && taken + ready < count &&
               (burst[ready] = prepare(&jobs[taken + ready])) != NULL)
            ready++;
        uint16_t accepted = rte_cryptodev_enqueue_burst(device, 0, burst, ready);
        taken += accepted;
        for (uint16_t index = accepted; index < ready; index++)
            release(burst[index]);
        if (accepted < ready || ready == 0)
            break;
    }
    return taken;
}

static unsigned poll(struct sealane_driver_done *done, unsigned count) {
    struct rte_crypto_op *burst[BURST];
    uint16_t ended = rte_cryptodev_dequeue_burst(device, 0, burst, count < BURST ? count : BURST);
    for (uint16_t index = 0; index < ended; index++) {
        struct job *own = rte_crypto_op_ctod_offset(burst[index], struct job *, NONCE_OFFSET);
        done[index].name = own->name;
        done[index].is_sealed = burst[index]->status == RTE_CRYPTO_OP_STATUS_SUCCESS;
        release(burst[index]);
    }
    return ended;
}

const struct sealane_driver *sealane_driver(void) {
    static const struct sealane_driver driver = {
        .version = SEALANE_DRIVER_VERSION,
        .start = start,
        .load = load,
        .unload = unload,
        .attach = attach,
        .detach = detach,
        .submit = submit,
        .poll = poll,
    };
    return &driver;
}
