/* A wall clock that is CLOCK_SKEW_S seconds ahead, for one process and its children (LD_PRELOAD).
 *
 * libfaketime 0.9.10 breaks time.sleep of Python 3.11, which is all it would take. Monotonic
 * clocks stay as they are; deadlines given in wall-clock time are handed to the kernel in its own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long skew(void) {
    const char *text = getenv("CLOCK_SKEW_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = (int)syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += skew();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static struct timespec unskewed(const struct timespec *deadline) {
    struct timespec real = *deadline;
    if (real.tv_sec > 1000000000) real.tv_sec -= skew(); /* else it is of a monotonic clock */
    return real;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec real = unskewed(deadline);
    return next(semaphore, &real);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                           const struct timespec *deadline) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec real = unskewed(deadline);
    return next(condition, mutex, &real);
}
