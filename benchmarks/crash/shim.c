/* Stands between a process and the C library: counts, logs, fails or ends at its operations on files.
 *
 * Loaded with LD_PRELOAD and silent until `crash_arm` is called, in a forked child. Only what lies below one
 * folder is seen. Every operation is logged, with its data, into memory shared with the parent, which
 * therefore knows it after SIGKILL too. Operations are serialised, so that the log has an order.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE, FSYNC, RENAME, LINK, UNLINK, RMDIR, MKDIR, TRUNCATE, CLOSE, LOCK, NOTE, CREATE };
enum { LOG, KILL_BEFORE, KILL_AMID, KILL_AFTER, FAIL_ONCE, FAIL_ON, FAIL_THEN_READ_ONLY, SHORT };

#define N_DESCRIPTORS 4096
#define PATH_NBYTES 512

struct head {
  uint64_t used;   /* bytes of records */
  uint64_t count;  /* operations seen */
  uint64_t fired;  /* number of the operation that was struck first, from 1; 0 if none was */
  uint64_t overflow;
};
struct record {
  uint32_t nbytes; /* of the whole record */
  uint32_t kind;
  int64_t result;  /* -errno where it failed */
  int64_t a, b;    /* by kind: descriptor, flags, offset, length */
  uint32_t n_first, n_second;
};

static struct head *shared;
static size_t capacity;
static char root[PATH_NBYTES];
static size_t n_root;
static pid_t armed;
static int mode, wanted_errno;
static uint64_t strike_at;
static uint32_t kinds; /* bits of the kinds that may fail */
static char names[N_DESCRIPTORS][PATH_NBYTES];
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

#define REAL(type, name, ...)                                     \
  static type (*real_##name)(__VA_ARGS__);                        \
  if (!real_##name) *(void **)&real_##name = dlsym(RTLD_NEXT, #name)

static int active(void) { return shared && armed == getpid(); }

static int below(const char *path) {
  return !strncmp(path, root, n_root) && (path[n_root] == '/' || path[n_root] == 0);
}

/* The absolute path; empty where it is not below the root. */
static const char *absolute(int folder, const char *path, char *into) {
  into[0] = 0;
  if (!path) return into;
  if (path[0] == '/') {
    if (strlen(path) < PATH_NBYTES) strcpy(into, path);
  } else {
    char base[PATH_NBYTES];
    if (folder == AT_FDCWD) {
      if (!getcwd(base, sizeof base)) return into;
    } else if (folder >= 0 && folder < N_DESCRIPTORS && names[folder][0]) {
      strcpy(base, names[folder]);
    } else {
      return into;
    }
    if (strlen(base) + strlen(path) + 2 < PATH_NBYTES) {
      strcpy(into, base);
      strcat(into, "/");
      strcat(into, path);
    }
  }
  size_t n = strlen(into);
  while (n > 1 && into[n - 1] == '/') into[--n] = 0;
  if (!below(into)) into[0] = 0;
  return into;
}

static int is_tracked(int fd) { return fd >= 0 && fd < N_DESCRIPTORS && names[fd][0]; }

static void put(uint32_t kind, int64_t result, int64_t a, int64_t b, const void *first, size_t n_first,
                const void *second, size_t n_second) {
  size_t nbytes = sizeof(struct record) + n_first + n_second;
  if (shared->used + nbytes > capacity) {
    shared->overflow = 1;
    return;
  }
  struct record head = {(uint32_t)nbytes, kind, result, a, b, (uint32_t)n_first, (uint32_t)n_second};
  char *at = (char *)(shared + 1) + shared->used;
  memcpy(at, &head, sizeof head);
  if (n_first) memcpy(at + sizeof head, first, n_first);
  if (n_second) memcpy(at + sizeof head + n_first, second, n_second);
  shared->used += nbytes;
}

static void put_paths(uint32_t kind, int64_t result, int64_t a, int64_t b, const char *one, const char *two) {
  put(kind, result, a, b, one, strlen(one), two, two ? strlen(two) : 0);
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static const uint32_t changing = 1u << CREATE | 1u << WRITE | 1u << RENAME | 1u << LINK | 1u << UNLINK |
                                 1u << RMDIR | 1u << MKDIR | 1u << TRUNCATE;

/* Counts an operation and says what is to be done with it: 0 go on, -1 fail with errno, 1 only a part. */
static int strike(uint32_t kind) {
  uint64_t number = ++shared->count;
  int hit = number == strike_at, later = strike_at && number >= strike_at;
  switch (mode) {
    case KILL_BEFORE:
      if (hit) shared->fired = number, die();
      return 0;
    case KILL_AMID:
      if (hit && kind != WRITE) shared->fired = number, die();
      if (hit) shared->fired = number;
      return hit ? 1 : 0;
    case KILL_AFTER:
      if (hit) shared->fired = number;
      return 0;
    case FAIL_ONCE:
      if (later && !shared->fired && kinds >> kind & 1) {
        shared->fired = number;
        errno = wanted_errno;
        return -1;
      }
      return 0;
    case FAIL_ON:
      if (later && kinds >> kind & 1) {
        if (!shared->fired) shared->fired = number;
        errno = wanted_errno;
        return -1;
      }
      return 0;
    case FAIL_THEN_READ_ONLY:
      if (later && !shared->fired && kinds >> kind & 1) {
        shared->fired = number;
        errno = wanted_errno;
        return -1;
      }
      if (shared->fired && changing >> kind & 1) {
        errno = EROFS;
        return -1;
      }
      return 0;
    case SHORT:
      if (later && !shared->fired && kind == WRITE) {
        shared->fired = number;
        return 1;
      }
      return 0;
  }
  return 0;
}

static void after(void) {
  if (mode == KILL_AFTER && shared->fired && shared->fired == shared->count) die();
}

/* ---- what the parent calls -------------------------------------------------------------------------- */

void crash_arm(void *region, size_t nbytes, const char *folder, int what, uint64_t at, int error,
               uint32_t which) {
  memset(names, 0, sizeof names);
  strncpy(root, folder, PATH_NBYTES - 1);
  n_root = strlen(root);
  capacity = nbytes - sizeof(struct head);
  mode = what, strike_at = at, wanted_errno = error, kinds = which;
  armed = getpid();
  shared = region;
}

void crash_disarm(void) { shared = 0; }

void crash_note(const char *text) {
  if (!active()) return;
  pthread_mutex_lock(&order);
  put(NOTE, 0, 0, 0, text, strlen(text), 0, 0);
  pthread_mutex_unlock(&order);
}

/* ---- the operations --------------------------------------------------------------------------------- */

#define ENTER pthread_mutex_lock(&order)
#define LEAVE                                                     \
  do {                                                            \
    int kept = errno;                                             \
    after();                                                      \
    pthread_mutex_unlock(&order);                                 \
    errno = kept;                                                 \
  } while (0)
#define RESULT(r) ((r) < 0 ? -(int64_t)errno : (int64_t)(r))


static int open_path(int folder, const char *path, int flags, mode_t permissions) {
  REAL(int, openat, int, const char *, int, ...);
  char name[PATH_NBYTES];
  if (!active()) return real_openat(folder, path, flags, permissions);
  absolute(folder, path, name);
  if (!name[0]) {
    int fd = real_openat(folder, path, flags, permissions);
    if (fd >= 0 && fd < N_DESCRIPTORS) names[fd][0] = 0;
    return fd;
  }
  struct stat found;
  int there = !stat(name, &found), is_folder = there && S_ISDIR(found.st_mode);
  int counts = is_folder || (flags & (O_WRONLY | O_RDWR | O_CREAT));
  ENTER;
  int fd = counts && strike((flags & O_CREAT) && !there ? CREATE : OPEN) < 0 ? -1 : real_openat(folder, path, flags, permissions);
  put_paths(OPEN, RESULT(fd), flags, there, name, 0);
  if (fd >= 0 && fd < N_DESCRIPTORS) strcpy(names[fd], name);
  if (counts)
    LEAVE;
  else
    pthread_mutex_unlock(&order);
  return fd;
}

#define WITH_MODE(name, last)                   \
  mode_t permissions = 0;                       \
  if (last & (O_CREAT | O_TMPFILE)) {           \
    va_list rest;                               \
    va_start(rest, last);                       \
    permissions = va_arg(rest, mode_t);         \
    va_end(rest);                               \
  }

int open(const char *path, int flags, ...) {
  WITH_MODE(open, flags)
  return open_path(AT_FDCWD, path, flags, permissions);
}
int open64(const char *path, int flags, ...) {
  WITH_MODE(open64, flags)
  return open_path(AT_FDCWD, path, flags, permissions);
}
int openat(int folder, const char *path, int flags, ...) {
  WITH_MODE(openat, flags)
  return open_path(folder, path, flags, permissions);
}
int openat64(int folder, const char *path, int flags, ...) {
  WITH_MODE(openat64, flags)
  return open_path(folder, path, flags, permissions);
}
int creat(const char *path, mode_t permissions) {
  return open_path(AT_FDCWD, path, O_CREAT | O_TRUNC | O_WRONLY, permissions);
}

/* The C library opens for itself: through a descriptor of ours it does not. */
static FILE *open_stream(const char *path, const char *how) {
  int plus = strchr(how, '+') != 0;
  int flags = how[0] == 'r' ? (plus ? O_RDWR : O_RDONLY)
                            : (plus ? O_RDWR : O_WRONLY) | O_CREAT | (how[0] == 'w' ? O_TRUNC : O_APPEND);
  int fd = open_path(AT_FDCWD, path, flags, 0666);
  return fd < 0 ? NULL : fdopen(fd, how);
}
FILE *fopen(const char *path, const char *how) {
  REAL(FILE *, fopen, const char *, const char *);
  return active() ? open_stream(path, how) : real_fopen(path, how);
}
FILE *fopen64(const char *path, const char *how) {
  REAL(FILE *, fopen64, const char *, const char *);
  return active() ? open_stream(path, how) : real_fopen64(path, how);
}

static ssize_t write_at(int fd, const struct iovec *parts, int n_parts, off_t offset) {
  REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
  REAL(ssize_t, write, int, const void *, size_t);
  size_t nbytes = 0;
  ssize_t total = 0;
  for (int i = 0; i < n_parts; i++) nbytes += parts[i].iov_len;
  ENTER;
  int done = strike(WRITE);
  int status = fcntl(fd, F_GETFL);
  off_t at = offset >= 0 ? offset : lseek(fd, 0, status & O_APPEND ? SEEK_END : SEEK_CUR);
  size_t allowed = done == 1 ? nbytes / 2 : nbytes;
  if (done == 1 && mode == SHORT && !allowed) allowed = nbytes;
  if (done < 0) {
    total = -1;
    put(WRITE, RESULT(total), fd, at, names[fd], strlen(names[fd]), 0, 0);
  }
  for (int i = 0; done >= 0 && i < n_parts && (size_t)total < allowed; i++) {
    size_t some = parts[i].iov_len < allowed - total ? parts[i].iov_len : allowed - total;
    if (!some) continue;
    ssize_t got = offset >= 0 ? real_pwrite(fd, parts[i].iov_base, some, offset + total)
                              : real_write(fd, parts[i].iov_base, some);
    put(WRITE, RESULT(got), fd, at + total, names[fd], strlen(names[fd]), parts[i].iov_base,
        got > 0 ? (size_t)got : 0);
    if (got < 0) {
      if (!total) total = -1;
      break;
    }
    total += got;
    if ((size_t)got < some) break;
  }
  if (done == 1 && mode == KILL_AMID) die();
  LEAVE;
  return total;
}

ssize_t write(int fd, const void *data, size_t nbytes) {
  REAL(ssize_t, write, int, const void *, size_t);
  struct iovec part = {(void *)data, nbytes};
  return active() && is_tracked(fd) ? write_at(fd, &part, 1, -1) : real_write(fd, data, nbytes);
}
ssize_t pwrite(int fd, const void *data, size_t nbytes, off_t offset) {
  REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
  struct iovec part = {(void *)data, nbytes};
  return active() && is_tracked(fd) ? write_at(fd, &part, 1, offset) : real_pwrite(fd, data, nbytes, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t nbytes, off_t offset) {
  return pwrite(fd, data, nbytes, offset);
}
ssize_t writev(int fd, const struct iovec *parts, int n_parts) {
  REAL(ssize_t, writev, int, const struct iovec *, int);
  return active() && is_tracked(fd) ? write_at(fd, parts, n_parts, -1) : real_writev(fd, parts, n_parts);
}
ssize_t pwritev(int fd, const struct iovec *parts, int n_parts, off_t offset) {
  REAL(ssize_t, pwritev, int, const struct iovec *, int, off_t);
  return active() && is_tracked(fd) ? write_at(fd, parts, n_parts, offset)
                                    : real_pwritev(fd, parts, n_parts, offset);
}

/* Copies within the kernel are refused, as by a system that has none: callers then read and write. */
ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t nbytes, unsigned flags) {
  REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
  if (!active() || !is_tracked(out)) return real_copy_file_range(in, in_at, out, out_at, nbytes, flags);
  errno = ENOSYS;
  return -1;
}
ssize_t sendfile(int out, int in, off_t *at, size_t nbytes) {
  REAL(ssize_t, sendfile, int, int, off_t *, size_t);
  if (!active() || !is_tracked(out)) return real_sendfile(out, in, at, nbytes);
  errno = ENOTSOCK;
  return -1;
}
ssize_t sendfile64(int out, int in, off_t *at, size_t nbytes) { return sendfile(out, in, at, nbytes); }

#define ON_DESCRIPTOR(name, kind, value, parameters, arguments, ...)      \
  int name parameters {                                                   \
    REAL(int, name, __VA_ARGS__);                                         \
    if (!active() || !is_tracked(fd)) return real_##name arguments;       \
    ENTER;                                                                \
    int got = strike(kind) < 0 ? -1 : real_##name arguments;              \
    put(kind, RESULT(got), fd, value, names[fd], strlen(names[fd]), 0, 0); \
    LEAVE;                                                                \
    return got;                                                           \
  }
ON_DESCRIPTOR(fsync, FSYNC, 0, (int fd), (fd), int)
ON_DESCRIPTOR(fdatasync, FSYNC, 1, (int fd), (fd), int)
ON_DESCRIPTOR(ftruncate, TRUNCATE, length, (int fd, off_t length), (fd, length), int, off_t)
ON_DESCRIPTOR(ftruncate64, TRUNCATE, length, (int fd, off64_t length), (fd, length), int, off64_t)
ON_DESCRIPTOR(flock, LOCK, how, (int fd, int how), (fd, how), int, int)

/* A failing close closes all the same, as Linux does. */
static int close_tracked(int fd, int is_folder_or_read_only) {
  REAL(int, close, int);
  ENTER;
  int failed = !is_folder_or_read_only && strike(CLOSE) < 0, why = errno;
  int got = real_close(fd);
  if (failed) got = -1, errno = why;
  put(CLOSE, RESULT(got), fd, 0, names[fd], strlen(names[fd]), 0, 0);
  names[fd][0] = 0;
  if (is_folder_or_read_only)
    pthread_mutex_unlock(&order);
  else
    LEAVE;
  return got;
}
int close(int fd) {
  REAL(int, close, int);
  if (!active() || !is_tracked(fd)) return real_close(fd);
  return close_tracked(fd, (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY);
}
int fclose(FILE *stream) {
  REAL(int, fclose, FILE *);
  int fd = stream ? fileno(stream) : -1;
  if (!active() || !is_tracked(fd)) return real_fclose(stream);
  ENTER;
  int failed = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && strike(CLOSE) < 0, why = errno;
  int got = real_fclose(stream);
  if (failed) got = EOF, errno = why;
  put(CLOSE, RESULT(got), fd, 0, names[fd], strlen(names[fd]), 0, 0);
  names[fd][0] = 0;
  LEAVE;
  return got;
}

#define ON_PATH(kind, folder, path, value, call)          \
  char name[PATH_NBYTES];                                 \
  if (!active() || !absolute(folder, path, name)[0]) return call; \
  ENTER;                                                  \
  int got = strike(kind) < 0 ? -1 : call;                 \
  put_paths(kind, RESULT(got), value, 0, name, 0);        \
  LEAVE;                                                  \
  return got;
#define ON_TWO_PATHS(kind, from_folder, from, to_folder, to, call)                       \
  char name[PATH_NBYTES], other[PATH_NBYTES];                                            \
  if (!active() || !absolute(from_folder, from, name)[0] || !absolute(to_folder, to, other)[0]) \
    return call;                                                                         \
  ENTER;                                                                                 \
  int got = strike(kind) < 0 ? -1 : call;                                                \
  put_paths(kind, RESULT(got), 0, 0, name, other);                                       \
  LEAVE;                                                                                 \
  return got;

int unlink(const char *path) {
  REAL(int, unlink, const char *);
  ON_PATH(UNLINK, AT_FDCWD, path, 0, real_unlink(path))
}
int unlinkat(int folder, const char *path, int flags) {
  REAL(int, unlinkat, int, const char *, int);
  ON_PATH(flags & AT_REMOVEDIR ? RMDIR : UNLINK, folder, path, 0, real_unlinkat(folder, path, flags))
}
int remove(const char *path) {
  REAL(int, remove, const char *);
  ON_PATH(UNLINK, AT_FDCWD, path, 0, real_remove(path))
}
int rmdir(const char *path) {
  REAL(int, rmdir, const char *);
  ON_PATH(RMDIR, AT_FDCWD, path, 0, real_rmdir(path))
}
int mkdir(const char *path, mode_t permissions) {
  REAL(int, mkdir, const char *, mode_t);
  ON_PATH(MKDIR, AT_FDCWD, path, permissions, real_mkdir(path, permissions))
}
int mkdirat(int folder, const char *path, mode_t permissions) {
  REAL(int, mkdirat, int, const char *, mode_t);
  ON_PATH(MKDIR, folder, path, permissions, real_mkdirat(folder, path, permissions))
}
int rename(const char *from, const char *to) {
  REAL(int, rename, const char *, const char *);
  ON_TWO_PATHS(RENAME, AT_FDCWD, from, AT_FDCWD, to, real_rename(from, to))
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
  REAL(int, renameat, int, const char *, int, const char *);
  ON_TWO_PATHS(RENAME, from_folder, from, to_folder, to, real_renameat(from_folder, from, to_folder, to))
}
int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
  REAL(int, renameat2, int, const char *, int, const char *, unsigned);
  ON_TWO_PATHS(RENAME, from_folder, from, to_folder, to,
               real_renameat2(from_folder, from, to_folder, to, flags))
}
int link(const char *from, const char *to) {
  REAL(int, link, const char *, const char *);
  ON_TWO_PATHS(LINK, AT_FDCWD, from, AT_FDCWD, to, real_link(from, to))
}
int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
  REAL(int, linkat, int, const char *, int, const char *, int);
  ON_TWO_PATHS(LINK, from_folder, from, to_folder, to, real_linkat(from_folder, from, to_folder, to, flags))
}
int truncate(const char *path, off_t length) {
  REAL(int, truncate, const char *, off_t);
  int fd = -1;
  if (!active()) return real_truncate(path, length);
  if ((fd = open(path, O_WRONLY)) < 0) return -1;
  int got = ftruncate(fd, length);
  close(fd);
  return got;
}
